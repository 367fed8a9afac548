"""The names users meet, frozen: whoever changes them changes this file, and says so."""

import dataclasses
import inspect

import l2l
from l2l.engine.layers import Layers
from l2l.schedule import VERBS, Lane


def test_public_names() -> None:
    assert sorted(l2l.__all__) == [
        "Adafactor",
        "AdamW",
        "AllLayers",
        "CheckpointError",
        "CheckpointFolder",
        "Choice",
        "Depth",
        "Engine",
        "Lion",
        "Plan",
        "ProgressiveLayerDropping",
        "RandomInit",
        "RecordGradients",
        "SGD",
        "SampledArchitecture",
        "StepReport",
        "StochasticDepth",
        "plan",
    ]
    for name in l2l.__all__:
        assert getattr(l2l, name).__doc__, name


def public_members(kind: type) -> list[str]:
    return sorted(name for name in vars(kind) if not name.startswith("_"))


def test_members_of_the_engine() -> None:
    assert public_members(l2l.Engine) == [
        "checkpoint_bytes",
        "close",
        "depth",
        "device",
        "evaluate",
        "export",
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
        "trace",
    ]


def test_arguments_of_the_engine() -> None:
    parameters = inspect.signature(l2l.Engine).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "model": inspect.Parameter.empty,
        "optimizer": None,
        "loss": None,
        "weights": None,
        "allow_missing_weights": False,
        "device": None,
        "device_memory": None,
        "host_memory": None,
        "microbatch_size": None,
        "precision": "bfloat16",
        "clip_norm": None,
        "layers": None,
        "stash": "host",
        "update": None,
        "nonfinite": "stop",
        "compile": None,
        "embedding": None,
        "kernel": "native",
        "seed": None,
        "prove": True,
        "depth": None,
        "overrides": None,
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
        "clip_norm": None,
        "layers": None,
        "compile": True,
        "hardware": None,
        "overrides": None,
        "world": None,
    }
    positional = [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY]
    assert positional == ["model", "batch"]


def test_members_of_a_plan() -> None:
    assert public_members(l2l.Plan) == [
        "bound",
        "budget_bytes",
        "choices",
        "ledger",
        "measured",
        "num_tokens",
        "phases",
        "predicted_seconds",
        "scaling",
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
        "remove",
        "state",
        "thaw",
    ]


def test_members_of_a_report() -> None:
    assert public_members(l2l.StepReport) == [
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
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "moments": "float32",
    }
    assert fields(l2l.Lion) == {
        "groups": None,
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
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
    }
    assert set(fields(l2l.RecordGradients)) == {"groups", "gradients"}


def test_verbs_and_operands_of_a_schedule() -> None:
    assert {name: " ".join(verb.operands) for name, verb in VERBS.items()} == {
        "take": "SGW>",
        "drop": "SGW>",
        "fetch": "LOT S>",
        "gather": "LOT S>",
        "release": "LOT S>",
        "refresh": "T m H<",
        "lookup": "m",
        "prologue": "m S< R> C< C>",
        "forward": "L m S< R< C< C> K>",
        "score": "m S< R< C<",
        "epilogue": "m S< G> R< C< C>",
        "backward": "L m S< G> R< C< K< C< C>",
        "regress": "m S< G> C< C< C>",
        "pool": "",
        "reduce": "LOT G>",
        "report": "",
        "drain": "LOT G< H>",
        "measure": "LOT G<",
        "collect": "T m H>",
        "update": "LOT H<",
        "settle": "LOT H<",
        "advance": "LOT H<",
        "complete": "LOT H<",
        "order": "LOT",
        "assign": "L",
        "lease": "L p W>",
        "redo": "L p S< G< W>",
        "renew": "LOT S> G<",
        "borrow": "L p H< W>",
        "rework": "L p W>",
        "repay": "L p W<",
        "revise": "LOT S> G<",
        "mirror": "LOT S<",
        "return": "LOT S>",
        "stash": "rhgkx m CRK<",
        "unstash": "rhgke m CRK>",
    }


def test_lanes_of_a_schedule() -> None:
    lanes = ["compute", "fetch", "drain", "stash", "unstash", "update", "lend", "rework"]
    lanes += ["gather", "reduce"]
    assert [lane.value for lane in Lane] == lanes
