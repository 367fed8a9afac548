"""Questions about integers on the device: answered by the host, or by the device if need be."""

import inside
import pytest
import torch
from families import FAMILIES, masks
from torch import Tensor

from l2l.model.host_mirror import MAX_ELEMENTS, QUESTIONS, HostMirror
from l2l.run.around_layers import AroundLayers
from l2l.run.outer_pass import OuterPass


def silently(tensor: Tensor, value: int) -> None:
    """Change a tensor so that only its mirror image remembers what it was."""
    tensor.data.fill_(value)


@pytest.fixture
def ids() -> Tensor:
    return torch.tensor([[1, 2, 3], [4, 5, 6]])


def mirror(ids: Tensor) -> HostMirror:
    return HostMirror({"ids": ids, "name": "x"}, {"ids": ids.clone(), "name": "x"})


def test_what_is_computed_of_the_batch_is_answered_by_the_host(ids: Tensor):
    with mirror(ids):
        mask = (ids > 0).to(device=ids.device, dtype=torch.bool)
        last = mask[:, -1].all()
        number = ids[0, 1]
        for one in (last, number):
            silently(one, 0)
        assert bool(last)
        assert number.item() == 2
        assert [10, 11, 12][number] == 12
        assert torch.equal(mask, mask.clone())
    assert not last, "outside nobody remembers"


def test_elements_by_a_list_of_numbers_come_from_the_host(ids: Tensor):
    with mirror(ids):
        ends = ids[:, [-1, 0]]
        assert ends.tolist() == [[3, 1], [6, 4]]
        silently(ends, 9)
        assert 6 in ends
        assert 9 not in ends
        silently(ids, 9)
        assert ids[[0], 1:].tolist() == [[2, 3]]
    assert 9 in ends


def test_floating_point_numbers_are_known_as_they_come(ids: Tensor):
    given = torch.tensor([0.5, 1.0])
    with HostMirror({"given": given}, {"given": given.clone()}) as mode:
        ones = torch.ones(2, 3)
        masks = ones.to(torch.bool), given > 0.7
        for one in masks:
            silently(one, 0)
        assert masks[0].all()
        assert masks[1].tolist() == [False, True]
        assert not mode._is_known(given * 2), "which may differ in its last bits"


def test_packed_sequences_are_found_as_transformers_finds_them(ids: Tensor):
    with mirror(ids):
        positions = torch.arange(3, device=ids.device).unsqueeze(0).expand(2, -1)
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        packed = (steps != 1).cumsum(-1)
        whole = (packed[:, -1] == 0).all()
        silently(whole, 0)
        assert whole


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda ids: (ids.float() * 0.1 > 0.35).any(), id="floating point"),
        pytest.param(lambda ids: torch.randint(0, 2, (1,))[0], id="random"),
        pytest.param(lambda ids: torch.randint_like(ids, 2)[0, 0], id="random, like another"),
        pytest.param(lambda ids: torch.tensor([1, 2]).repeat(MAX_ELEMENTS).max(), id="large"),
        pytest.param(lambda ids: (ids + UNKNOWN).max(), id="of what is not known"),
    ],
)
def test_what_has_no_mirror_image_is_asked_itself(ids: Tensor, make):
    with mirror(ids):
        found = make(ids)
        for value in (0, 1):
            silently(found, value)
            assert found.item() == value


UNKNOWN = torch.tensor(5)


def test_what_was_written_to_is_asked_itself(ids: Tensor):
    with mirror(ids):
        mask = ids > 3
        first, row = mask[0, 0], mask[1]
        assert not first
        assert row.all()
        mask[0, 0] = True  # through another view of the same memory
        row.logical_and_(UNKNOWN > 9)
        assert first
        assert not row.any()
        assert not mask[1].all()


def test_the_batch_of_the_host_is_never_written_to(ids: Tensor):
    host = ids.clone()
    with HostMirror({"ids": ids}, {"ids": host}):
        ids.masked_fill_(ids == 2, 9)
        assert ids[0, 1].item() == 9
    assert host.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_function_that_fails_on_the_host_costs_its_mirror_image_only(ids: Tensor):
    calls = []

    def once(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        if len(calls) > 1:
            raise RuntimeError("not here")
        return tensor + 1

    mode = mirror(ids)
    found = mode.__torch_function__(once, (), (ids,))
    assert len(calls) == 2
    assert not mode._is_known(found)
    assert mode._is_known(ids)


def test_a_batch_on_the_device_has_no_mirror_image(ids: Tensor):
    on_meta = torch.empty(2, 3, dtype=torch.int64, device="meta")
    mode = HostMirror({"ids": ids, "more": ids + 1}, {"ids": on_meta})
    assert not mode._is_known(ids)


@pytest.mark.parametrize("kind", ["nothing", "all ones", "padded", "packed"])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "gemma3", "bert_classification"])
def test_all_that_transformers_asks_is_known(name: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """And it trains as it does when everything is asked of the device."""
    family, unanswered = FAMILIES[name], []

    class Watched(HostMirror):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            tensors = [one for one in args if isinstance(one, Tensor)]
            if func in QUESTIONS and not all(map(self._is_known, tensors)):
                unanswered.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    def losses() -> list[float]:
        batch = family.batch(4)
        batch = {k: v for k, v in batch.items() if k != "attention_mask"}
        batch |= masks(kind, batch["input_ids"])
        with inside.engine(family.build(), device="cpu", microbatch_size=2, seed=1) as engine:
            first = engine.step(batch).loss
            unanswered.clear()  # the trial asks
            return [first, *(engine.step(batch).loss for _ in range(2))]

    expected = losses()
    monkeypatch.setattr(OuterPass, "_mirrored", lambda _, *batches: Watched(*batches))
    monkeypatch.setattr(AroundLayers, "inputs", lambda _, step, m: copied(step.microbatches[m]))
    assert losses() == expected
    assert not unanswered


def copied(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in batch.items()}
