"""The names users meet, frozen: whoever changes them changes this file, and says so."""

import dataclasses
import inspect

import l2l
from l2l.engine.layers import Layers
from l2l.schedule import KINDS, VERBS, Lane


def test_public_names() -> None:
    assert sorted(l2l.__all__) == [
        "Adafactor",
        "AdamW",
        "AllLayers",
        "CheckpointError",
        "CheckpointFolder",
        "Choice",
        "Depth",
        "Disk",
        "Engine",
        "Execution",
        "Lion",
        "Muon",
        "Plan",
        "ProgressiveLayerDropping",
        "RandomInit",
        "RecordGradients",
        "SGD",
        "SampledArchitecture",
        "ScheduleFreeAdamW",
        "StepReport",
        "StochasticDepth",
        "TokenLoss",
        "plan",
    ]
    for name in l2l.__all__:
        assert getattr(l2l, name).__doc__, name


def public_members(kind: type) -> list[str]:
    return sorted(name for name in vars(kind) if not name.startswith("_"))


def test_members_of_the_engine() -> None:
    assert public_members(l2l.Engine) == [
        "averaged",
        "checkpoint_bytes",
        "close",
        "depth",
        "device",
        "disk_written_bytes",
        "evaluate",
        "export",
        "generate",
        "layers",
        "load",
        "named_weights",
        "plan",
        "predict",
        "prepare_saving",
        "save",
        "state",
        "state_dict",
        "step",
        "step_number",
        "streamed_share",
        "trace",
    ]


def test_arguments_of_the_engine() -> None:
    parameters = inspect.signature(l2l.Engine).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "model": inspect.Parameter.empty,
        "optimizer": None,
        "loss": None,
        "split": None,
        "weights": None,
        "allow_missing_weights": False,
        "device": None,
        "device_memory": None,
        "host_memory": None,
        "disk": None,
        "microbatch_size": None,
        "precision": "bfloat16",
        "base": None,
        "clip_norm": None,
        "layers": None,
        "nonfinite": "stop",
        "compile": None,
        "seed": None,
        "prove": True,
        "depth": None,
        "autograd": False,
        "execution": None,
    }
    assert dataclasses.asdict(l2l.Execution()) == {
        "stash": "host",
        "update": None,
        "embedding": None,
        "kernel": "native",
        "compile_ahead": "wait",
        "overrides": {},
        "group_size": None,
    }
    positional = [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY]
    assert positional == ["model"]


def test_arguments_of_a_plan() -> None:
    """Those of the engine that a plan depends on, with their defaults, and what it is for."""
    parameters = inspect.signature(l2l.plan).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "model": inspect.Parameter.empty,
        "batch": None,
        "num_rows": 8,
        "length": 1024,
        "optimizer": None,
        "device_memory": None,
        "host_memory": None,
        "microbatch_size": None,
        "precision": "bfloat16",
        "base": None,
        "clip_norm": None,
        "layers": None,
        "compile": True,
        "hardware": None,
        "overrides": None,
        "world": None,
        "disk": None,
    }
    positional = [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY]
    assert positional == ["model", "batch"]


def test_members_of_a_plan() -> None:
    assert public_members(l2l.Plan) == [
        "bound",
        "bounds",
        "budget_bytes",
        "choices",
        "disk_read_bytes",
        "disk_written_bytes",
        "first_step",
        "host_limit_bytes",
        "ledger",
        "machine",
        "measured",
        "num_tokens",
        "phases",
        "predicted_seconds",
        "scaling",
        "sentence",
        "total_bytes",
    ]


def test_arguments_of_its_methods() -> None:
    for method in (l2l.Engine.step, l2l.Engine.evaluate, l2l.Engine.predict):
        parameters = inspect.signature(method).parameters
        assert list(parameters) == ["self", "batch", "layers"]
        assert parameters["layers"].kind is inspect.Parameter.KEYWORD_ONLY


def test_members_of_the_layers() -> None:
    assert public_members(Layers) == [
        "freeze",
        "frozen",
        "grow",
        "insert",
        "layout_of",
        "origins",
        "remove",
        "state",
        "thaw",
    ]


def test_members_of_a_report() -> None:
    assert public_members(l2l.StepReport) == [
        "compiled",
        "gradient_norm",
        "layer_norms",
        "layers",
        "loss",
        "loss_scale",
        "num_tokens",
        "skip_reason",
        "skipped",
        "update_norms",
    ]


def fields(description: type) -> dict[str, object]:
    return {field.name: field.default for field in dataclasses.fields(description)}


def test_optimizers_have_the_settings_and_defaults_of_torch() -> None:
    assert fields(l2l.AdamW) == {
        "groups": None,
        "average": None,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "moments": "float32",
    }
    assert fields(l2l.Lion) == {
        "groups": None,
        "average": None,
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
    }
    assert fields(l2l.Adafactor) == {
        "groups": None,
        "lr": 1e-2,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
        "weight_decay": 0.0,
    }
    assert fields(l2l.SGD) == {
        "groups": None,
        "average": None,
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
    }
    assert set(fields(l2l.RecordGradients)) == {"groups", "average", "gradients"}


def test_kinds_of_lines_of_a_schedule() -> None:
    """What a line may say, without numbers, and the places it names then."""
    described = {
        name: " ".join((kind.units, *("".join(place) for place in kind.places))).strip()
        for name, kind in KINDS.items()
    }
    assert described == {
        "take": "SGW>",
        "release": "SGW>",
        "release U": "LTO S!unit",
        "release U:p": "T S!unit",
        "fetch U": "LTO S>unit D<weights",
        "fetch U:p": "T S>unit",
        "fetch U.state:p": "L W>state",
        "fetch U.state": "L B>state",
        "fetch U.weights": "L D>weights",
        "fetch U.all:p": "L H< W>state",
        "fetch v m": "CRKP>value E<value",
        "fetch v.stash m": "E>value",
        "drain U": "LTO S<unit",
        "drain U free": "LTO S!unit",
        "drain U.grad": "LTO G<gradient H>gradient",
        "drain U.grad:p": "T G<gradient H>table",
        "drain U.norm": "LTO G<gradient",
        "drain U.state": "L B!state",
        "drain U.weights": "L D!weights",
        "drain U.all:p": "L W<state",
        "drain v m": "CRKP<value E>value",
        "drain v.stash m": "E<value",
        "drain loss": "",
        "gather U": "LTO S=unit",
        "reduce U": "LTO G=gradient",
        "reduce loss": "",
        "forward Pro m": "P S<own R>r C<e C>h+",
        "forward U m": "L S<unit R<r C<h C>h+ K>k",
        "forward Int m": "I S<own R<r R>r+ C<h C>h+",
        "loss m": "S<own G>sum R<r C<h C>g",
        "forward Epi m": "E S<own R<r C<h C>y P>s+",
        "forward U:p m": "T S<unit S<own C<y P<s P>s+",
        "loss Epi m": "E P<s P>c",
        "backward U:p m": "T S<unit S<own G>gradient G>sum C<y P<c C<d+ C>d",
        "backward Epi m": "E S<own G>sum R<r C<h C<d C>g",
        "backward U m": "L S<unit G>gradient R<r C<h K<k C<g+ C>g",
        "backward Pro m": "P S<own G>sum R<r C<e K<k C<g+ C>x C>i",
        "backward Int m": "I S<own G>sum R<r C<h C<g+ C>g",
        "lookup m": "",
        "collect U m": "T H>",
        "collect U": "LTO H<",
        "update U host": "LTO H<gradient B=state D=weights",
        "update U host late": "LTO H< B=state D=weights",
        "update U host late weights": "LTO H<",
        "update U host late moments": "LTO H<",
        "update U:m host late": "T H<",
        "update U:m host late weights": "T H<",
        "order U": "L",
        "order U late": "LTO",
        "update U device": "LTO S=unit G<gradient",
        "update U device late": "LTO S=unit G<",
        "update U:p device": "L S<unit G<gradient W=state",
        "update U:p device late": "L W=state",
    }


def test_verbs_of_a_schedule() -> None:
    assert (
        *("take", "release", "fetch", "drain", "gather", "reduce", "forward", "loss", "backward"),
        *("lookup", "collect", "update", "order"),
    ) == VERBS


def test_lanes_of_a_schedule() -> None:
    lanes = ["compute", "fetch", "drain", "stash", "unstash", "update", "lend", "rework"]
    lanes += ["gather", "reduce", "read", "write"]
    assert [lane.value for lane in Lane] == lanes
