"""Several ranks on gloo: the step of one rank that has all their rows, with a share of its memory.

All scenarios of ranks.py run in the same processes, once for each number of ranks.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from families import FAMILIES
from safetensors.torch import load_file
from torch import Tensor

from l2l import cli
from l2l.distributed import Share
from l2l.parameter_server.layout import FlatLayout

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "reproduce"))
import killed  # noqa: E402 (a script, not a package)

SIZES = (1, 4, 2)
FOUR = pytest.param(4, marks=pytest.mark.thorough)
several = pytest.mark.parametrize("size", [2, FOUR])
Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """By number of ranks, what each rank has found; later worlds load what earlier have saved."""
    four = any(item.get_closest_marker("thorough") for item in request.session.items)
    sizes = [size for size in SIZES if size < 4 or four]
    return ranks.run(tmp_path_factory.mktemp("ranks"), *sizes)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        if theirs.is_floating_point():
            difference = float((found[name] - theirs).abs().max())
            assert difference <= bound * (float(theirs.abs().max()) + 1e-3), name


def assembled(results: Results, size: int, scenario: str) -> dict[str, Tensor]:
    """Whole gradients, flat, of the pieces that ranks have; copies must agree bit by bit."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for one in results[size]:
        for owner, (start, value) in one[scenario]["pieces"].items():
            known = pieces.setdefault(owner, {}).setdefault(start, value.view(-1))
            assert torch.equal(known, value.view(-1)), owner
    return {owner: torch.cat([of[key] for key in sorted(of)]) for owner, of in pieces.items()}


@several
@pytest.mark.parametrize(
    "scenario", [name for name in ranks.SCENARIOS if name.startswith("gradients")]
)
def test_gradients_are_those_of_one_rank(results: Results, scenario: str, size: int):
    mine, theirs = (assembled(results, number, scenario) for number in (size, 1))
    assert mine.keys() == theirs.keys()
    for owner, expected in theirs.items():
        difference = float((mine[owner] - expected).abs().max())
        assert difference <= 1e-6 * float(expected.abs().max()), owner
    [expected] = results[1]
    for one in results[size]:
        for key in ("loss", "norm"):
            assert one[scenario][key] == pytest.approx(expected[scenario][key], rel=1e-6)


TRAINED = (
    "tied_clipped",
    "eager",
    "frozen_half",
    "experts",
    "copies",
    "uneven",
    "unlabelled",
    "adafactor",
    "changing_depth",
)


@pytest.mark.parametrize(
    ("scenario", "size"),
    [
        pytest.param(one, size, marks=pytest.mark.thorough if size == 4 else ())
        for one in TRAINED
        for size in (2, 4)
        if size < 4 or one not in ranks.SMALLER
    ],
)
def test_twenty_steps_are_those_of_one_rank(results: Results, scenario: str, size: int):
    [alone], together = results[1], results[size]
    for one in together:
        assert one[scenario]["losses"] == pytest.approx(alone[scenario]["losses"], rel=1e-5)
        assert one[scenario]["evaluated"] == pytest.approx(alone[scenario]["evaluated"], rel=1e-5)
        assert_close(one[scenario]["state"], alone[scenario]["state"], bound=1e-5)
        for name, value in together[0][scenario]["state"].items():
            assert torch.equal(one[scenario]["state"][name], value), "ranks must agree bit by bit"


def test_ranks_choose_the_same_layers(results: Results):
    chosen = {tuple(one["changing_depth"]["layers"]) for size in (1, 2) for one in results[size]}
    assert len(chosen) == 1
    assert len(set(next(iter(chosen)))) > 3


def test_8_bit_moments_are_cut_at_their_blocks(results: Results):
    """In 16 bits the order of sums is seen; a block that was cut would be seen more."""
    [alone], together = results[1], results[2]
    for one in together:
        assert one["eight_bit"]["losses"] == pytest.approx(alone["eight_bit"]["losses"], rel=1e-3)


@several
def test_host_memory_is_shared_out(results: Results, size: int):
    """All that holds the model; padding takes a little more."""
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    [alone], together = results[1], results[size]
    for one in together:
        for kind in kinds:
            mine, whole = one["tied_clipped"]["host"][kind], alone["tied_clipped"]["host"][kind]
            assert mine <= whole / size + 6 * 4 * 128 * 4, kind


@several
def test_the_device_does_not_need_more_for_others(results: Results, size: int):
    [alone], together = results[1], results[size]
    for one in together:
        assert one["tied_clipped"]["peak"] <= 1.05 * alone["tied_clipped"]["peak"]


@several
def test_copies_hold_as_many_shares_as_a_group_has_ranks(results: Results, size: int):
    groups = [one["copies"]["host"]["exp_avg"] for one in results[size]]
    shared = [one["tied_clipped"]["host"]["exp_avg"] for one in results[size]]
    assert all(copy > share for copy, share in zip(groups, shared, strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_skip_a_step_that_overflows_on_one(results: Results, size: int):
    found = [one["float16_overflow"] for one in results[size]]
    assert all(one == found[0] for one in found)
    skipped, scales = zip(*found[0], strict=True)
    assert skipped[2:] == (False, True, False), "the first scales may be too large"
    assert scales[4] < scales[3]


def test_every_rank_predicts_its_own_rows(results: Results):
    expected = results[1][0]["outputs"]
    found = torch.cat([one["outputs"] for one in results[2]])
    assert torch.allclose(found, expected, atol=1e-6)


@several
def test_a_run_goes_on_bit_by_bit_with_as_many_ranks(results: Results, size: int):
    for one in results[size]:
        straight, loaded = one["saved"]["straight on"], one["saved"][f"saved-{size}"]
        assert all(torch.equal(straight[name], loaded[name]) for name in straight)


@pytest.mark.parametrize(
    ("saved", "size"),
    [
        (1, 2),
        pytest.param(1, 4, marks=pytest.mark.thorough),
        pytest.param(4, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_does_not_depend_on_how_many_have_saved_it(
    results: Results, saved: int, size: int
):
    expected = results[1][0]["saved"]["straight on"]
    for one in results[size]:
        assert_close(one["saved"][f"saved-{saved}"], expected, bound=1e-5)


@pytest.mark.parametrize("size", [1, 2, FOUR])
def test_what_ranks_export_together_is_the_whole_model(results: Results, size: int):
    found, trained = (results[size][0]["saved"][name] for name in ("exported", "straight on"))
    assert found.keys() == trained.keys() - {"lm_head.weight"}  # tied
    for name, value in found.items():
        assert torch.equal(value, trained[name]), name


def test_one_rank_may_go_through_the_collectives(results: Results, tmp_path: Path):
    """As a world of one, with the schedule of many."""
    names = ("gradients_tied", "tied_clipped", "frozen_half", "outputs")
    [found] = ranks.run(tmp_path, 1, backend="gloo", scenarios=names)[1]
    [alone] = results[1]
    for name in ("tied_clipped", "frozen_half"):
        assert found[name]["losses"] == alone[name]["losses"]
        for key, value in alone[name]["state"].items():
            assert torch.equal(found[name]["state"][key], value), key
    assert torch.equal(found["outputs"], alone["outputs"])
    assert found["gradients_tied"]["pieces"].keys() == alone["gradients_tied"]["pieces"].keys()


@several
def test_refusals_name_what_is_wrong(results: Results, size: int):
    for one in results[size]:
        assert f"group_size=3 does not divide the {size} ranks" in one["refused"]["group size"]
        assert "rank 1 differ in 'model.embed_tokens.weight'" in one["refused"]["weights"]
        assert "embedding='host', but several ranks hold" in one["refused"]["embedding"]
        assert "every label of the batch is ignored" in one["refused"]["labels"]
        assert "'kinds' contains -100" in one["refused"]["targets"]
        assert "share of the optimizer's state" in one["refused"]["optimizer"]
        assert all(one["refused"]["predicted"]), "outputs, with a loss that is NaN"
        assert "on all ranks together" in one["refused"]["alone"]
        state, expected = one["refused"]["state"], FAMILIES["llama_tied"].build().state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in state)


# -- Training --------------------------------------------------------------------------------------


def test_torchrun_trains_as_a_single_process_does(tmp_path: Path):
    """And what two processes have saved, one goes on with."""
    killed.prepare(tmp_path / "run", steps=4)
    settings = tmp_path / "run" / "run.toml"
    config = tmp_path / "run" / "model" / "config.json"
    config.write_text(
        config.read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0')
    )

    def words(output: str, *more: str) -> list[str]:
        return ["train", *more, "--output", str(tmp_path / output), str(settings)]

    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*started, "-m", "l2l", *words("together")],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert cli.main(words("alone")) == 0
    together, alone = (killed.metrics(tmp_path / name) for name in ("together", "alone"))
    assert [one["loss"] for one in together] == pytest.approx(
        [one["loss"] for one in alone], rel=2e-3
    )
    assert done.stdout.count("step 4/4") == 1, "the first rank speaks for all"
    assert (tmp_path / "together" / "model" / "model.safetensors").exists()
    exported = tmp_path / "exported"
    assert cli.main(["export", str(tmp_path / "together"), str(exported)]) == 0
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (exported, tmp_path / "together/model")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert cli.main(words("together", "--steps", "6")) == 0
    assert [one["step"] for one in killed.metrics(tmp_path / "together")] == [1, 2, 3, 4, 5, 6]


# -- Layouts ---------------------------------------------------------------------------------------


@cache
def layout(number: int) -> FlatLayout:
    family = FAMILIES["llama_tied"]
    entries = [(n, tuple(p.shape), p.dtype) for n, p in family.build().named_parameters()]
    entries += [("mask", (3, 5), torch.bool), ("tiny", (1,), torch.float32)]
    return FlatLayout.of(entries, num_shares=number)


@pytest.mark.parametrize("number", [1, 2, 3, 8, 64])
def test_shares_make_up_the_whole(number: int):
    whole = layout(number)
    assert whole == layout(1).cut_for(number)
    shares = [Share(index=index, number=number) for index in range(number)]
    held = [whole.held(share) for share in shares]
    for name in whole.names:
        pieces = [whole.piece(name, share) for share in shares]
        ends = [0, *(piece.stop for piece in pieces if piece.stop > piece.start)]
        starts = [piece.start for piece in pieces if piece.stop > piece.start]
        assert starts == ends[:-1]
        assert ends[-1] == torch.Size(whole.shapes()[name]).numel()
        for piece, own in zip(pieces, held, strict=True):
            assert (name in own.names) == (piece.stop > piece.start)
            if name in own.names and number > 1:
                assert own.shapes()[name] == (piece.stop - piece.start,)
    for segments in zip(whole.segments, *(own.segments for own in held), strict=True):
        assert {one.numel for one in segments[1:]} == {segments[0].numel // number}
        assert all(one.numel % 128 == 0 for one in segments)
