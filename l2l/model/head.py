"""A head's loss without its logits: words times tokens of them are never whole.

[Note: logits put off] A head makes words times tokens of logits, and a loss makes as many numbers
again, several times. They are never needed at once: the gradient of a token's logits is known as
soon as its loss is. So the product with a head's weight is *put off*: the model's code gets a
stand-in of the right shape, may widen, reshape and cut it, and when it asks for a plain cross-
entropy, an *answer* stands for that. What the code multiplies it with, as by
`1 / num_items_in_batch`, is seen by differentiating the model's loss. Then loss and gradients are
computed for some tokens at a time: logits, losses, and at once the gradients of hidden state and
head, the latter straight into its float32 sum. Any other use of the stand-in computes the logits
after all.

[Note: slices of a head] A head may also come to the device slice by slice of its rows, the words.

    log p(label) = logit of the label - log of the sum of the exponentials of all logits

Both parts can be added up. Of every token its *sums* are kept, in float32: the largest logit so
far, the sum of the exponentials relative to it, the label's own logit, and how much the token
counts. When all slices were seen, that gives a log-probability for each token; a loss turns these
into a *coefficient* each, its derivative by the log-probability. The gradient of a logit is then

    coefficient * (1 if the word is the label, else 0, less the word's probability)

which needs no other logit once the sum is known. So logits are made twice, a slice at a time. What
the model's code does with its logits before the loss, a bias and functions of single numbers such
as soft-capping, is done with those of each slice. What it multiplies the answer with counts for
every token; a loss to which it adds anything is not one of a head in slices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from l2l.model.compiling import Compilable

PIECE_BYTES = 64 << 20  # of float32 logits that are worked on at once without a compiler
SLICE_PIECE_BYTES = 64 << 20  # of logits of a slice, in their own type
EVEN_ROWS = 128  # of matrices: products of others take as long as the next multiple's
NOT_COUNTED = -1  # a label that a loss ignores
LOSS_ARGUMENTS = "input target weight size_average ignore_index reduce reduction label_smoothing"

Sum = Callable[[Tensor, Tensor], None]
"""Adds outputs' gradient and inputs of a matrix product to a weight's gradient."""
Pointwise = Callable[[Tensor], Tensor]
"""A function of single numbers."""


def by_name(names: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function of torch by name."""
    return dict(zip(names.split(), args, strict=False)) | dict(kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plain cross-entropy of a head's logits, as the model's code asked for it."""

    given: Tensor  # what the head is given, [tokens, hidden]
    weight: Tensor
    targets: Tensor
    ignored: int
    mean: bool  # whether it is one over the tokens that count; else their sum
    bias: Tensor | None = None
    pointwise: tuple[Pointwise, ...] = ()  # what was done with the logits before
    answer: Tensor | None = None  # what stands for its loss
    factor: float | Tensor = 1.0  # what the model multiplies it with

    @classmethod
    def of(
        cls, given: Tensor, weight: Tensor, args: Any, kwargs: Mapping[str, Any], **more: Any
    ) -> Question | None:
        """Read the arguments of `torch.nn.functional.cross_entropy`; None: it is another kind."""
        asked = by_name(LOSS_ARGUMENTS, args, kwargs)
        targets, reduction = asked["target"], asked.get("reduction", "mean")
        plain = (
            all(asked.get(name) is None for name in ("weight", "size_average", "reduce"))
            and not asked.get("label_smoothing")
            and reduction in ("mean", "sum")
            and asked["input"].dim() == 2
            and targets.dim() == 1
        )
        if not plain:
            return None
        ignored, mean = asked.get("ignore_index", -100), reduction == "mean"
        return cls(given=given, weight=weight, targets=targets, ignored=ignored, mean=mean, **more)

    @property
    def labels(self) -> Tensor:
        """The targets, `NOT_COUNTED` where they are ignored.

        As torch's own, it fails for targets that are no words.
        """
        is_ignored = self.targets == self.ignored
        words = self.targets.new_zeros(()).expand(self.weight.shape[0])
        words.gather(0, self.targets.masked_fill(is_ignored, 0))
        return self.targets.masked_fill(is_ignored, NOT_COUNTED)

    def counts(self, scale: float) -> Tensor:
        """How much every token counts in the loss times a number."""
        counted = self.targets != self.ignored
        number = counted.sum().clamp(min=1) if self.mean else 1
        return counted * (scale * self.factor / number)

    def made_into(self, loss: Tensor, others: Sequence[Tensor] = ()) -> Question | None:
        """The same, with what the model's code has multiplied the answer with to make its loss.

        Args:
            loss: the model's own; without a graph, the answer was 1.
            others: what it must not be made of.

        Returns:
            None: the loss is something else.
        """
        if not torch.is_grad_enabled():
            return replace(self, factor=loss.detach())
        if self.answer is None or not loss.requires_grad:
            return None
        wanted = [self.answer, *(one for one in others if one.requires_grad)]
        found: Sequence[Tensor | None] = torch.autograd.grad(
            loss, wanted, create_graph=True, allow_unused=True
        )
        factor, *rest = found
        if factor is None or factor.requires_grad or any(one is not None for one in rest):
            return None
        return replace(self, factor=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How the gradient of a head's weight is added up, and how much is worked on at once."""

    add: Sum | None  # None: nobody wants it
    scale: float  # derivative of what is differentiated by the loss
    num_rows: int  # tokens at a time, at most
    compiled: bool

    def pieces(self, num_tokens: int) -> Iterator[slice]:
        """As few as may be, about as large as each other; the last may be smaller."""
        number = max(1, -(-num_tokens // self.num_rows))
        even = -(-num_tokens // number)
        size = min(-(-even // EVEN_ROWS) * EVEN_ROWS, self.num_rows)
        return (slice(start, start + size) for start in range(0, num_tokens, size))


Asked = list[tuple[Question, Head | None]]
"""Questions that an answer stands for; what is known of a head whose logits are put off."""


def cross_entropy(question: Question, head: Head) -> Tensor:
    """The loss of logits that were put off."""
    scale, apply = head.scale * question.factor, cast(Any, _HeadLoss.apply)
    given, weight, targets = question.given, question.weight, question.targets
    found: Tensor = apply(given, weight, targets, question.ignored, question.mean, head, scale)
    return found


def completed(loss: Tensor, asked: Asked) -> Tensor:
    """The model's loss, with those of its heads where it has answers.

    Raises:
        RuntimeError: it does not add up products of these.
    """
    for question, head in asked:
        own = question.made_into(loss)
        if own is None or head is None:
            raise RuntimeError(
                "the model makes something else of its head's loss than it did when it was tried: "
                "it multiplies it with more than numbers, or does not return it."
            )
        loss = loss + (cross_entropy(own, head) * own.factor).to(loss.dtype)
    return loss


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy of a head's logits, all gradients made at once ([Note: logits put off])."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        given: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignored: int,
        mean: bool,
        head: Head,
        scale: float | Tensor,
    ) -> Tensor:
        counted = targets != ignored
        columns = torch.where(counted, targets, 0)
        number = counted.sum() if mean else torch.ones((), device=given.device)
        factors = counted * (scale / number)
        total = torch.zeros((), device=given.device)
        gradient = torch.empty_like(given) if ctx.needs_input_grad[0] else None
        for rows in head.pieces(given.shape[0]):
            logits = F.linear(given[rows], weight)
            losses = differentiate(logits, columns[rows], factors[rows], compiled=head.compiled)
            total += torch.where(counted[rows], losses, 0.0).sum()
            if gradient is not None:
                torch.mm(logits, weight, out=gradient[rows])
            if head.add is not None:
                head.add(logits, given[rows])
            del logits
        ctx.save_for_backward(gradient)
        ctx.scale = scale
        return total / number

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if gradient is not None:
            gradient.mul_(gradients[0] / ctx.scale)
        return gradient, None, None, None, None, None, None


def differentiate(
    logits: Tensor, columns: Tensor, factors: Tensor, *, compiled: bool = False
) -> Tensor:
    """Each row's cross-entropy; the logits become their gradient, each row times its factor."""
    columns, factors = columns.unsqueeze(1), factors.unsqueeze(1)
    # What a row's label picks is read before, and written after, all else is written over.
    both = _losses(logits, logits.gather(1, columns), factors, compiled=compiled)
    losses: Tensor = both[0]
    logits.scatter_(1, columns, both[1])
    return losses.squeeze(1)


def _in_place(logits: Tensor, picked: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of rows and gradients of picked logits; all others are replaced by theirs."""
    wide = logits.float()
    largest = wide.amax(dim=1, keepdim=True)
    shifted = wide - largest
    norm = shifted.exp().sum(dim=1, keepdim=True).log()
    logarithm = picked.float() - largest - norm
    logits.copy_((shifted - norm).exp() * factors)
    return -logarithm, ((logarithm.exp() - 1) * factors).to(logits.dtype)


def _frugally(logits: Tensor, picked: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a compiler, in little memory: some rows at a time."""
    step = max(1, PIECE_BYTES // (4 * logits.shape[1]))
    losses, gradients = torch.empty_like(factors), torch.empty_like(picked)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        losses[rows], gradients[rows] = _in_place(logits[rows], picked[rows], factors[rows])
    return losses, gradients


_losses = Compilable(_in_place, plain=_frugally)


# --------------------------------------------------------------------------------------------------
# In slices


@final
@dataclass(frozen=True, slots=True)
class Words:
    """One slice of a head: the weights of some words, from the first of them on."""

    weight: Tensor
    first: int
    bias: Tensor | None = None
    pointwise: tuple[Pointwise, ...] = ()  # what the model does with logits before its loss
    compiled: bool = False

    def pieces(self, num_tokens: int) -> Iterator[slice]:
        """Tokens that are worked on at once."""
        most = SLICE_PIECE_BYTES // max(1, self.weight.itemsize * self.weight.shape[0])
        size = max(EVEN_ROWS, most // EVEN_ROWS * EVEN_ROWS)
        return (slice(start, start + size) for start in range(0, num_tokens, size))

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which labels are among these words, and where; 0 for the others."""
        own = (labels >= self.first) & (labels < self.first + self.weight.shape[0])
        return own.unsqueeze(1), torch.where(own, labels - self.first, 0).unsqueeze(1)

    def logits(self, given: Tensor) -> Tensor:
        """Of these words, as the model's code has them before its loss."""
        found = F.linear(given, self.weight, self.bias)
        for function in self.pointwise:
            found = function(found)
        return found


def first_sums(counts: Tensor) -> Tensor:
    """The sums of tokens before any word was seen; `counts` is how much each of them counts."""
    nothing = torch.zeros_like(counts, dtype=torch.float32)
    return torch.stack([torch.full_like(nothing, -torch.inf), nothing, nothing, counts.float()])


def add_words(words: Words, given: Tensor, labels: Tensor, sums: Tensor) -> Tensor:
    """The sums with those of a slice.

    Args:
        words: the slice.
        given: what the head is given, [tokens, hidden].
        labels: of the tokens; `NOT_COUNTED` where there is none.
        sums: of the slices before.
    """
    found = sums.clone()
    for rows in words.pieces(given.shape[0]):
        logits = words.logits(given[rows])
        own, columns = words.columns(labels[rows])
        largest, total, picked, _ = found[:, rows]
        picked.add_(torch.where(own, logits.gather(1, columns), 0).squeeze(1))
        highest, number = _largest_and_sum(logits, compiled=words.compiled)
        both = torch.maximum(largest, highest)
        total.mul_((largest - both).exp()).add_(number * (highest - both).exp())
        largest.copy_(both)
    return found


def log_probabilities(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Of every token's label; and the logarithm of the sum of the exponentials of all logits."""
    largest, total, picked, _ = sums
    norm = largest + total.log()
    return picked - norm, norm


def coefficients(norm: Tensor, of_tokens: Tensor) -> Tensor:
    """What slices need for their gradients: `norm` as above, derivatives by log-probabilities."""
    return torch.stack([norm, of_tokens.float()])


def unwind_words(
    words: Words,
    given: Tensor,
    labels: Tensor,
    coefficients: Tensor,
    *,
    so_far: Tensor | None = None,
    wants_given: bool = True,
    add: Sum | None = None,
    of_bias: Tensor | None = None,
) -> Tensor | None:
    """The backward pass of a slice.

    Args:
        words: the slice.
        given: what the head was given.
        labels: of the tokens.
        coefficients: of the tokens.
        so_far: what other slices have found for the gradient of `given`; is added to.
        wants_given: whether that is wanted.
        add: adds to the gradient of the slice's weights; None: nobody wants it.
        of_bias: sums of the bias's gradient, to be added to; None: nobody wants it.

    Returns:
        the gradient of `given`, as far as it is known.
    """
    found = torch.empty_like(given) if wants_given else None
    for rows in words.pieces(given.shape[0]):
        norm, factor = (one.unsqueeze(1) for one in coefficients[:, rows])
        gradient = _gradient(words, given[rows], labels[rows], norm, factor)
        if found is not None:
            if so_far is None:
                torch.mm(gradient, words.weight, out=found[rows])
            else:
                torch.addmm(so_far[rows], gradient, words.weight, out=found[rows])
        if add is not None:
            add(gradient, given[rows])
        if of_bias is not None:
            of_bias.add_(gradient.sum(0, dtype=of_bias.dtype))
        del gradient
    return found


def _gradient(words: Words, given: Tensor, labels: Tensor, norm: Tensor, factor: Tensor) -> Tensor:
    """Of a slice's logits, as the product with the weights gives them."""
    own, columns = words.columns(labels)
    if not words.pointwise:
        logits = F.linear(given, words.weight, words.bias)
        _into_gradient(words, logits, own, columns, norm, factor)
        return logits
    leaf = F.linear(given, words.weight, words.bias).requires_grad_()
    with torch.enable_grad():
        logits = leaf
        for function in words.pointwise:
            logits = function(logits)
    outer = logits.detach().clone()
    _into_gradient(words, outer, own, columns, norm, factor)
    return torch.autograd.grad(logits, leaf, outer)[0]


def _into_gradient(
    words: Words, logits: Tensor, own: Tensor, columns: Tensor, norm: Tensor, factor: Tensor
) -> None:
    """Let logits be their gradient; those of labels are read before, and written after, others."""
    picked = logits.gather(1, columns).float()
    of_picked = factor * (own.float() - (picked - norm).exp())
    _turn(logits, norm, factor, compiled=words.compiled)
    logits.scatter_(1, columns, of_picked.to(logits.dtype))


def _reduce(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of every token, and the sum of the exponentials relative to it."""
    wide = logits.float()
    largest = wide.amax(dim=1).clamp(min=torch.finfo(wide.dtype).min)  # all may be minus infinity
    return largest, (wide - largest.unsqueeze(1)).exp().sum(dim=1)


def _overwrite(logits: Tensor, norm: Tensor, factor: Tensor) -> None:
    logits.copy_((logits.float() - norm).exp() * -factor)


_largest_and_sum = Compilable(_reduce)
_turn = Compilable(_overwrite)


# --------------------------------------------------------------------------------------------------
# Losses of log-probabilities


@final
@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss that is a function of every label's log-probability, and of the batch.

    For losses of preferences, say. The model's own loss must be a plain cross-entropy of its head's
    logits with the batch's labels; it is not taken. `function` is given the log-probabilities,
    [rows, positions], each where the model's cross-entropy has the label (for causal models a
    position ahead), and 0 where a label is ignored; and the batch, on the same device. It returns
    (sum, weight), or a scalar: a mean over rows. Logits are never whole: the head comes in slices.
    """

    function: Callable[[Tensor, Mapping[str, Any]], Tensor | tuple[Tensor, Any]]

    def __call__(self, found: Tensor, batch: Mapping[str, Any]) -> Tensor | tuple[Tensor, Any]:
        """The loss of log-probabilities, [tokens]."""
        return self.function(found.view(len(batch["labels"]), -1), batch)


@contextlib.contextmanager
def watching(function: object) -> Iterator[Callable[[Any], Any]]:
    """Inside the block a model's code runs as a whole, for the user's loss of what it returns.

    Yields:
        what gives, from the outputs, what that loss is a function of: they themselves, or the
        log-probabilities of labels that were seen.
    """
    if not isinstance(function, TokenLoss):
        yield lambda outputs: outputs
        return
    seen = _CrossEntropies()
    with seen:
        yield lambda _: seen.last()


@final
class _CrossEntropies(TorchFunctionMode):
    """Notes the log-probabilities in the place of plain cross-entropies, which are 0 then."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else kwargs.get("input")
        question = None
        if func is F.cross_entropy:
            question = Question.of(logits, logits.transpose(0, -1), args, kwargs)
        if question is None:
            return func(*args, **kwargs)
        labels = question.labels
        wide = torch.log_softmax(logits.float(), dim=1)
        picked = wide.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
        self._found.append(torch.where(labels == NOT_COUNTED, 0, picked))
        return logits.new_zeros(())

    def last(self) -> Tensor:
        """Those of the last one.

        Raises:
            ValueError: there was none.
        """
        if not self._found:
            raise ValueError(
                "loss=l2l.TokenLoss needs a model whose own loss is a plain cross-entropy of its "
                "logits (torch.nn.functional.cross_entropy). None was taken: put labels into the "
                "batch, or give a loss of the model's outputs."
            )
        return self._found[-1]
