"""Costs of passes that never run: closed forms on small graphs, an H200's figures on a real layer.

`MEASURED` was taken on an H200: one Llama layer in bfloat16 on 8 x 1024 tokens, alone on the device
and compiled by `torch.compile`; eager for comparison.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from l2l.device.checking import ByteCount
from l2l.planner.hardware import H200
from l2l.planner.layer_cost import PassCost, count_kept_pass, count_pass
from l2l.planner.tape import Tape

MEGABYTE = 1e6
MEASURED = {  # milliseconds; megabytes beyond inputs, most at once
    "forward": (2.6, 370),
    "recompute and backward": (7.35, 1090),
    "kept forward": (2.8, None),
    "kept backward": (5.5, 875),
    "eager forward": (3.7, None),
    "eager backward": (7.35, 1390),
}
MEASURED_KEPT = 690
ROWS, LENGTH, WIDTH = 8, 1024, 3072


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, needs_gradient: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_gradient)


class LlamaPasses:
    """The passes through one layer that the figures are of."""

    def __init__(self, device: str = "meta") -> None:
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=8192,
            num_attention_heads=24,
            num_key_value_heads=8,
            attn_implementation="sdpa",
        )
        given = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self.layer = LlamaDecoderLayer(config, 0)
                self.hidden = torch.empty(ROWS, LENGTH, WIDTH, requires_grad=True)
                self.gradient = torch.empty(ROWS, LENGTH, WIDTH)
                self.rotary = (torch.empty(1, LENGTH, 128), torch.empty(1, LENGTH, 128))
        finally:
            torch.set_default_dtype(given)

    def forward(self) -> Tensor:
        return self.layer(self.hidden, position_embeddings=self.rotary, attention_mask=None)

    def forward_without_graph(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def backward(self, output: Any) -> tuple[Tensor, ...]:
        wanted = [self.hidden, *self.layer.parameters()]
        return torch.autograd.grad([output], wanted, [self.gradient])

    def recompute(self) -> tuple[Tensor, ...]:
        return self.backward(self.forward())


@pytest.fixture(scope="module")
def costs() -> dict[str, PassCost]:
    llama = LlamaPasses()
    kept = count_kept_pass(llama.forward, llama.backward, fused=True)
    eager = count_kept_pass(llama.forward, llama.backward, fused=False)
    return {
        "forward": count_pass(llama.forward_without_graph, fused=True),
        "recompute and backward": count_pass(llama.recompute, fused=True),
        "kept forward": kept[0],
        "kept backward": kept[1],
        "eager forward": eager[0],
        "eager backward": eager[1],
    }


@pytest.mark.parametrize("name", MEASURED)
def test_seconds_are_near_those_measured(costs: dict[str, PassCost], name: str):
    milliseconds, _ = MEASURED[name]
    assert costs[name].seconds(H200) * 1e3 == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize("name", [name for name, (_, nbytes) in MEASURED.items() if nbytes])
def test_memory_is_near_that_measured_and_not_below(costs: dict[str, PassCost], name: str):
    _, megabytes = MEASURED[name]
    assert 0.95 * megabytes <= costs[name].working_bytes / MEGABYTE <= 1.1 * megabytes


def test_what_a_compiled_graph_keeps_is_near_that_measured(costs: dict[str, PassCost]):
    cost = costs["kept forward"]
    assert cost.kept_bytes / MEGABYTE == pytest.approx(MEASURED_KEPT, rel=0.05)
    assert cost.working_bytes >= cost.kept_bytes + cost.output_bytes
    assert costs["kept backward"].kept_bytes == 0


def test_outputs_are_counted(costs: dict[str, PassCost]):
    hidden_bytes = ROWS * LENGTH * WIDTH * 2
    layer_bytes = 2 * sum(parameter.numel() for parameter in LlamaPasses().layer.parameters())
    assert costs["forward"].output_bytes == hidden_bytes
    assert costs["recompute and backward"].output_bytes == hidden_bytes + layer_bytes
    assert costs["forward"].kept_bytes == 0


def test_a_compiled_recomputation_leaves_out_the_last_product(costs: dict[str, PassCost]):
    last_product = 2 * ROWS * LENGTH * 8192 * WIDTH
    both = costs["kept forward"].matrix_flops + costs["kept backward"].matrix_flops
    assert costs["recompute and backward"].matrix_flops == both - last_product
    assert count_pass(LlamaPasses().recompute, fused=False).matrix_flops == both


def test_fake_tensors_cost_what_meta_tensors_cost(costs: dict[str, PassCost]):
    with FakeTensorMode():
        llama = LlamaPasses("cpu")
        assert count_pass(llama.recompute, fused=True) == costs["recompute and backward"]


# --------------------------------------------------------------------------------------------------
# Closed forms

SIDE = 1024
SQUARE = SIDE * SIDE * 2  # bytes


def square(*, needs_gradient: bool = False) -> Tensor:
    return meta(SIDE, SIDE, needs_gradient=needs_gradient)


def test_a_chain_of_elementwise_operations_is_one_kernel_if_fused():
    first, second = square(), square()

    def chain() -> Tensor:
        return (first * second).exp().add(1.0)

    fused, plain = count_pass(chain, fused=True), count_pass(chain, fused=False)
    assert (fused.num_kernels, fused.moved_bytes, fused.working_bytes) == (1, 3 * SQUARE, SQUARE)
    assert (plain.num_kernels, plain.moved_bytes) == (3, 7 * SQUARE)
    assert plain.working_bytes == 2 * SQUARE
    assert fused.output_bytes == plain.output_bytes == SQUARE
    assert fused.matrix_flops == plain.matrix_flops == 0


def test_what_a_product_reads_is_written_once_and_the_product_is_not_traffic():
    left, right = square(), square()
    cost = count_pass(lambda: (left.float() * 2).sin().bfloat16() @ right, fused=True)
    assert cost.matrix_flops == 2 * SIDE**3
    assert (cost.num_kernels, cost.moved_bytes, cost.working_bytes) == (2, 2 * SQUARE, 2 * SQUARE)


def test_a_norm_is_one_kernel_and_a_sum_over_rows_another():
    rows = square()

    def normed_and_summed() -> tuple[Tensor, Tensor]:
        wide = rows.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.bfloat16(), wide.sum(0)

    cost = count_pass(normed_and_summed, fused=True)
    assert (cost.num_kernels, cost.moved_bytes) == (2, 3 * SQUARE + SIDE * 4)


def test_a_product_of_few_rows_waits_for_memory():
    few, weight = meta(1, SIDE), square()
    cost = count_pass(lambda: few @ weight, fused=True)
    assert cost.moved_bytes == pytest.approx(SQUARE, rel=0.02)


def test_writing_into_a_piece_of_a_given_buffer_moves_that_piece():
    sums = meta(64 * SIDE * SIDE, dtype=torch.float32)
    piece, gradient = sums[: SIDE * SIDE].view(SIDE, SIDE), square()
    for fused in (True, False):
        cost = count_pass(lambda: piece.add_(gradient), fused=fused)
        assert (cost.num_kernels, cost.moved_bytes) == (1, 5 * SQUARE)
        assert cost.working_bytes == cost.output_bytes == 0


def test_views_are_free():
    tensor = square()
    cost = count_pass(lambda: tensor.t().view(SIDE, SIDE)[1:].unsqueeze(0), fused=False)
    assert (cost.num_kernels, cost.moved_bytes, cost.output_bytes) == (0, 0, 0)


def test_random_numbers_are_kept_for_the_backward_pass():
    hidden, gradient = square(needs_gradient=True), square()
    cost = count_pass(
        lambda: torch.autograd.grad(
            [functional.dropout(hidden.exp(), 0.5) @ hidden], [hidden], [gradient]
        ),
        fused=True,
    )
    assert cost.matrix_flops == 2 * 2 * SIDE**3
    assert cost.working_bytes >= 3 * SQUARE


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_does_not_write_its_scores(*, masked: bool, grouped: bool):
    query = meta(2, 8, 2048, 64, needs_gradient=True)
    key, value = (meta(2, 2 if grouped else 8, 2048, 64, needs_gradient=True) for _ in range(2))
    mask = meta(2, 1, 2048, 2048, dtype=torch.bool) if masked else None
    scores_bytes = 2 * 8 * 2048 * 2048 * 2
    one = 2 * 8 * 2048 * 64 * 2

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=grouped
        )

    def backward() -> tuple[Tensor, ...]:
        output = attend()
        return torch.autograd.grad([output], [query, key, value], [torch.empty_like(output)])

    assert count_pass(attend, fused=True).matrix_flops == 4 * 2 * 8 * 2048 * 2048 * 64
    for fused in (True, False):
        cost = count_pass(backward, fused=fused)
        mask_bytes = 2 * 2048 * 2048 * 2 if masked else 0
        assert 4 * one <= cost.working_bytes < 12 * one + 3 * mask_bytes < scores_bytes


def test_the_loss_of_a_large_vocabulary_writes_logits_once_if_fused():
    words, tokens, width = 32_000, 2048, 512
    hidden, weight = meta(tokens, width, needs_gradient=True), meta(words, width)
    labels = meta(tokens, dtype=torch.int64)

    def loss() -> tuple[Tensor, ...]:
        logits = functional.linear(hidden, weight).float()
        return torch.autograd.grad([functional.cross_entropy(logits, labels)], [hidden])

    logits_bytes = tokens * words * 2
    fused, plain = count_pass(loss, fused=True), count_pass(loss, fused=False)
    assert logits_bytes < fused.working_bytes < 2.2 * logits_bytes
    assert plain.working_bytes > 4 * logits_bytes
    assert fused.moved_bytes < 4 * logits_bytes < plain.moved_bytes


def test_memory_that_is_not_fused_is_what_running_takes():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def run(layer: nn.Module, hidden: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        def backward() -> tuple[Tensor, ...]:
            gradient = torch.zeros_like(hidden)
            return torch.autograd.grad([layer(hidden).tanh()], [hidden], [gradient])

        return backward

    hidden = torch.randn(4, 32, 64, requires_grad=True)
    # Attention has its own kernels on the CPU: compare what is around it.
    layer.self_attn = nn.Identity()
    layer._sa_block = lambda x, *_, **__: x * 2  # type: ignore[method-assign, assignment]
    with ByteCount() as count:
        run(layer, hidden)()
    layer_without_data = layer.to("meta")
    cost = count_pass(
        run(layer_without_data, hidden.detach().to("meta").requires_grad_()), fused=False
    )
    assert cost.working_bytes == count.peak_bytes


def test_nothing_is_held_afterwards():
    given = square()
    count_pass(lambda: given * 2, fused=True)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Tape]
