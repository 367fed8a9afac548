"""What loops of other libraries ask for: arguments have a fate, optimizers are taken over."""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import inside
import lightning.pytorch as lightning
import pytest
import torch
import transformers
import trl
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import TrainingArguments

import l2l
from l2l.loops import FIELDS, FIELDS_OF_TRL, Field
from l2l.loops import trainer as loops_trainer

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "trainers"))
tiny = importlib.import_module("tiny")
clm = importlib.import_module("clm")

pytestmark = [
    pytest.mark.usefixtures("frozen_garbage"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
Trainer = l2l.loops.streamed(transformers.Trainer)
CONFIGS = (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.RewardConfig)


def arguments(**given: Any) -> TrainingArguments:
    """They do not pass what `TrainingArguments` itself refuses on this machine."""
    made = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", max_steps=2)
    for name, value in given.items():
        setattr(made, name, value)
    return made


def trainer_of(model: Any = None, *, l2l: Any = None, **given: Any) -> Any:
    given.setdefault("args", arguments())
    given.setdefault("train_dataset", clm.blocks())
    return Trainer(model or tiny.language_model(), l2l=l2l, **given)


# --------------------------------------------------------------------------------------------------
# Fields


def test_every_field_of_training_arguments_has_a_fate() -> None:
    assert {one.name for one in dataclasses.fields(TrainingArguments)} == set(FIELDS)


def test_every_field_of_trl_that_has_a_fate_is_there() -> None:
    there = {one.name for config in CONFIGS for one in dataclasses.fields(config)}
    assert set(FIELDS_OF_TRL) <= there - set(FIELDS)


def names(fate: str, table: Any = FIELDS) -> list[str]:
    return [name for name, field in table.items() if field.fate == fate]


ASKING = {"debug": ["underflow_overflow"], "local_rank": 1}


@pytest.mark.parametrize("name", names("refused"))
def test_a_field_that_is_refused_is_named_with_the_remedy(name: str) -> None:
    model = tiny.language_model()
    before = model.state_dict()
    asked = arguments(**{name: ASKING.get(name, True)})
    with pytest.raises(ValueError, match=f"{name}=") as refusal:
        Trainer(model, asked)
    assert FIELDS[name].word in str(refusal.value)
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())


@pytest.mark.parametrize("name", names("refused", FIELDS_OF_TRL))
def test_a_field_of_trl_that_is_refused_is_named(name: str) -> None:
    config = next(one for one in CONFIGS if name in {each.name for each in dataclasses.fields(one)})
    asked = config(output_dir="unused", use_cpu=True, bf16=False)
    setattr(asked, name, True)
    with pytest.raises(ValueError, match=f"{name}="):
        l2l.loops.streamed(trl.SFTTrainer)(tiny.language_model(), asked)


def test_all_that_is_refused_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)fsdp=.*deepspeed="):
        Trainer(tiny.language_model(), arguments(fsdp=["full_shard"], deepspeed="settings.json"))


@pytest.mark.parametrize("name", names("needless"))
def test_a_field_that_is_needless_is_turned_off(name: str) -> None:
    given = arguments(**{name: 1})
    trainer = trainer_of(args=given)
    assert getattr(given, name) == 1  # theirs stay as they are
    if FIELDS[name] != Field("needless", "there is one process"):
        assert name == "fsdp_config" or not getattr(trainer.args, name)


MAPPED: dict[str, tuple[dict[str, Any], Any]] = {
    "gradient_accumulation_steps": ({}, None),  # tests of losses
    "optim": ({"optim": "sgd"}, lambda one: "momentum" in one.optimizer.defaults),
    "learning_rate": ({"learning_rate": 0.5}, lambda one: group(one)["lr"] == 0.5),
    "weight_decay": ({"weight_decay": 0.25}, lambda one: group(one)["weight_decay"] == 0.25),
    "adam_beta1": ({"adam_beta1": 0.5}, lambda one: group(one)["betas"][0] == 0.5),
    "adam_beta2": ({"adam_beta2": 0.5}, lambda one: group(one)["betas"][1] == 0.5),
    "adam_epsilon": ({"adam_epsilon": 0.5}, lambda one: group(one)["eps"] == 0.5),
    "max_grad_norm": ({"max_grad_norm": 0.5}, lambda one: one._resources.clip_norm == 0.5),
    "bf16": ({"bf16": True}, lambda one: inside.link(one) is torch.bfloat16),
    "fp16": ({"fp16": True}, lambda one: inside.link(one) is torch.float16),
    "torch_compile": ({"torch_compile": True}, lambda one: inside.compiler(one).is_on),
    "torch_compile_backend": (
        {"torch_compile": True, "torch_compile_backend": "eager"},
        lambda one: inside.compiler(one).is_on,
    ),
    "seed": ({"seed": 7}, lambda one: inside.seed(one) == 7),
    "use_cpu": ({}, lambda one: one.device.torch_device.type == "cpu"),
}


def group(engine: l2l.Engine) -> dict[str, Any]:
    return engine.optimizer.param_groups[0]


def test_every_field_that_is_mapped_is_tested() -> None:
    assert set(MAPPED) == set(names("mapped"))


@pytest.mark.parametrize("name", [name for name, (_, holds) in MAPPED.items() if holds])
def test_a_field_that_is_mapped_becomes_a_setting_of_the_engine(name: str) -> None:
    given, holds = MAPPED[name]
    trainer = trainer_of(args=arguments(**given))
    trainer.create_optimizer()
    assert holds(trainer.engine)
    trainer.close()


# --------------------------------------------------------------------------------------------------
# Optimizers and settings


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw_8bit", l2l.AdamW), ("paged_adamw_32bit", l2l.AdamW), ("lion_32bit", l2l.Lion)],
)
def test_what_the_engine_has_under_another_name(name: str, kind: type[Any]) -> None:
    trainer = trainer_of(args=arguments(optim=name, weight_decay=0.1))
    trainer.create_optimizer()
    assert isinstance(inside.planning(trainer.engine).optimizer, kind)
    decays = {
        p: one["weight_decay"] for one in trainer.optimizer.param_groups for p in one["params"]
    }
    assert {name: decays[p] for name, p in trainer.model.named_parameters() if "norm" in name} == {
        name: 0.0 for name, _ in trainer.model.named_parameters() if "norm" in name
    }
    assert decays[trainer.model.lm_head.weight] == 0.1
    trainer.close()


def test_an_optimizer_that_no_engine_has_is_refused_by_its_name() -> None:
    trainer = trainer_of(args=arguments(optim="adafactor"))
    with pytest.raises(ValueError, match=r"optim='adafactor' does not run in an engine"):
        trainer.create_optimizer()


@pytest.mark.parametrize("given", [l2l.Lion(lr=0.5), l2l.Adafactor(lr=0.5)])
def test_an_optimizer_of_the_engines_own_may_be_given(given: Any) -> None:
    trainer = trainer_of(args=arguments(max_grad_norm=0.0), l2l={"optimizer": given})
    trainer.create_optimizer()
    assert group(trainer.engine)["lr"] == 0.5
    trainer.close()


def test_two_optimizers_are_refused() -> None:
    model = tiny.language_model()
    own = torch.optim.AdamW(model.parameters())
    trainer = trainer_of(model, optimizers=(own, None), l2l={"optimizer": l2l.Lion()})
    with pytest.raises(ValueError, match="Leave one of them out"):
        trainer.create_optimizer()
    assert trainer.optimizer is own


def test_settings_that_are_the_trainers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['clip_norm', 'devcie_memory'\]"):
        trainer_of(l2l={"clip_norm": 1.0, "devcie_memory": "8GiB"})


def test_models_that_trl_loads_stay_on_the_host(tmp_path: Path) -> None:
    tiny.language_model().save_pretrained(tmp_path / "model")
    kind = l2l.loops.streamed(trl.SFTTrainer)
    given = {"train_dataset": tiny.texts(8), "processing_class": tiny.tokenizer()}
    config = trl.SFTConfig(output_dir=tmp_path, use_cpu=True, bf16=False)
    trainer = kind(str(tmp_path / "model"), config, **given)
    assert trainer.args.model_init_kwargs == {"device_map": None}
    assert trainer.args.gradient_checkpointing is False
    config.model_init_kwargs = {"device_map": "auto"}
    with pytest.raises(ValueError, match="has device_map='auto'"):
        kind(str(tmp_path / "model"), config, **given)
    with pytest.raises(ValueError, match="SFTTrainer got no args"):
        kind(str(tmp_path / "model"), **given)


def test_only_trainers_are_streamed() -> None:
    assert l2l.loops.streamed(Trainer) is Trainer
    with pytest.raises(ValueError, match=r"Expected transformers.Trainer"):
        l2l.loops.streamed(torch.nn.Linear)


def test_a_trainer_of_another_kind_is_not_streamed_by_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    l2l.loops.streamed.cache_clear()
    monkeypatch.delattr(transformers.Trainer, "_clip_grad_norm")
    with pytest.raises(ValueError, match=r"a Trainer without \['_clip_grad_norm'\]"):
        l2l.loops.streamed(transformers.Trainer)


def test_what_replaces_the_trainers_methods_is_known() -> None:
    own = {name for name in vars(loops_trainer.Streaming) if not name.startswith("__")}
    theirs = {name for name in own if hasattr(transformers.Trainer, name)}
    assert theirs == set(loops_trainer.REPLACED)


def test_a_loss_of_routers_is_taken_of_one_batch() -> None:
    model = tiny.language_model()
    model.config.output_router_logits = True
    trainer = trainer_of(model, args=arguments(gradient_accumulation_steps=4))
    with pytest.raises(ValueError, match=r"(?s)output_router_logits=True.*batch_size=32"):
        trainer.create_optimizer()


def test_no_trainer_has_names_that_are_ours() -> None:
    ours = {name for name in vars(loops_trainer.Streaming) if not name.startswith("__")}
    ours |= set(vars(trainer_of())) - set(
        vars(transformers.Trainer(tiny.language_model(), arguments()))
    )
    kinds = [trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, trl.RewardTrainer, trl.KTOTrainer]
    for kind in [*kinds, transformers.Seq2SeqTrainer]:
        own = {name for base in kind.__mro__[:-2] for name in vars(base)}
        source = Path(inspect.getfile(kind)).read_text()
        own |= set(re.findall(r"self\.(\w+) = ", source))
        assert not (ours - set(loops_trainer.REPLACED) - {"_precompute_ref_logps"}) & own, kind


def losses(trainer: Any) -> list[float]:
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def trained(plain: bool, folder: Path, model: Any, **given: Any) -> Any:
    kind = transformers.Trainer if plain else Trainer
    args = TrainingArguments(**tiny.settings(folder, use_cpu=True, max_steps=6))
    collate = transformers.DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    rows = clm.blocks()
    trainer = kind(model, args, train_dataset=rows, data_collator=collate, **given)
    trainer.train()
    return trainer


def test_a_given_optimizer_and_its_scheduler_are_taken_over(tmp_path: Path) -> None:
    found = []
    for plain in (True, False):
        model = tiny.language_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        found.append(trained(plain, tmp_path, model, optimizers=(optimizer, fall)))
    plain_one, streamed = found
    assert losses(streamed) == pytest.approx(losses(plain_one), abs=1e-5)
    streamed.close()


def test_an_adapter_is_trained_and_saved(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    found = [
        trained(p, tmp_path, get_peft_model(tiny.language_model(), config)) for p in (True, False)
    ]
    assert losses(found[1]) == pytest.approx(losses(found[0]), abs=1e-5)
    saved = []
    for trainer, name in zip(found, ("plain", "streamed"), strict=True):
        trainer.save_model(tmp_path / name)
        saved.append(load_file(tmp_path / name / "adapter_model.safetensors"))
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-3, atol=1e-5)
    found[1].close()


class Doubled(transformers.Trainer):
    """Takes a loss of its own."""

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return 2 * super().compute_loss(*args, **named)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"use_dora": True}, "a variant of LoRA"), ({"modules_to_save": ["lm_head"]}, "no scaling")],
)
def test_an_adapter_that_cannot_be_turned_off_says_so(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    model = get_peft_model(tiny.language_model(), config)
    trainer = Trainer(model, arguments())
    trainer.create_optimizer()
    with pytest.raises(RuntimeError, match=reason), model.disable_adapter():
        pass
    trainer.close()
    with model.disable_adapter():  # as ever
        pass


def test_a_copy_of_an_adapter_as_a_reference_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = l2l.loops.streamed(trl.DPOTrainer)(
        get_peft_model(tiny.language_model(), config),
        args=trl.DPOConfig(**tiny.settings(tmp_path, use_cpu=True, bf16=False)),
        train_dataset=tiny.pairs(8),
        processing_class=tiny.tokenizer(),
    )
    with pytest.raises(ValueError, match="without adapter and peft_config"):
        trainer.create_optimizer()


def test_a_trainer_without_an_engine_is_as_before(tmp_path: Path) -> None:
    model, reference = tiny.language_model(), tiny.language_model()
    trainer = l2l.loops.streamed(trl.DPOTrainer)(
        model,
        reference,
        args=trl.DPOConfig(**tiny.settings(tmp_path, use_cpu=True, bf16=False)),
        train_dataset=tiny.pairs(8),
        processing_class=tiny.tokenizer(),
        l2l={"nonfinite": "wait"},
    )
    with pytest.raises(ValueError, match="nonfinite='wait'"):
        trainer.train()
    for one in (model, reference):
        assert one(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
        assert next(one.parameters()).numel() == 258 * 32
    assert trainer.optimizer is None


def test_a_streamed_trainer_may_be_subclassed() -> None:
    class Mine(l2l.loops.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            return super().compute_loss(*args, **named)

    found = []
    for kind in (l2l.loops.Trainer, Mine, l2l.loops.streamed(Mine)):
        trainer = kind(tiny.language_model(), arguments())
        trainer.create_optimizer()
        found.append(trainer._is_whole)
        trainer.close()
    assert found == [True, False, False]


def test_an_adapter_is_turned_off_for_a_call(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny.language_model(), config)
    batch = {"input_ids": torch.arange(16).view(2, 8)}
    with torch.no_grad():
        adapted = model(**batch).logits
        with model.disable_adapter():
            base = model(**batch).logits
        args = arguments(torch_compile=True, torch_compile_backend="aot_eager")
        trainer = l2l.loops.streamed(Doubled)(model, args)
        trainer.create_optimizer()
        for _ in range(2):
            torch.testing.assert_close(model(**batch).logits, adapted)
            with model.disable_adapter():
                torch.testing.assert_close(model(**batch).logits, base)
    trainer.close()


def test_a_loss_of_ones_own_goes_backward_through_the_model(tmp_path: Path) -> None:
    args = TrainingArguments(**tiny.settings(tmp_path, use_cpu=True, max_steps=6))
    found = []
    for kind in (Doubled, l2l.loops.streamed(Doubled)):
        collate = transformers.DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
        trainer = kind(
            tiny.language_model(), args, train_dataset=clm.blocks(), data_collator=collate
        )
        trainer.train()
        found.append(trainer)
    assert losses(found[1]) == pytest.approx(losses(found[0]), abs=1e-5)
    found[1].close()


# --------------------------------------------------------------------------------------------------
# Lightning and Accelerate


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_has_the_losses_of_plain_pytorch(manual: bool, tmp_path: Path) -> None:
    example = importlib.import_module("lightning_module")
    found = []
    quiet = {"accelerator": "cpu", "enable_checkpointing": False, "enable_model_summary": False}
    for plain in (True, False):
        module = example.LanguageModel(manual=manual)
        trainer = example.make(plain=plain, folder=tmp_path, manual=manual, **quiet)
        trainer.fit(module, example.rows(), example.rows(16))
        (held_out,) = trainer.validate(module, example.rows(16), verbose=False)
        found.append((module, held_out["held_out"]))
    (plain_module, expected), (module, held_out) = found
    assert len(module.losses) == tiny.STEPS
    assert module.losses == pytest.approx(plain_module.losses, abs=1e-5)
    assert held_out == pytest.approx(expected, abs=1e-5)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, plain_module.state_dict()[name], rtol=1e-3, atol=1e-5)


class Watch(lightning.Callback):
    """Traces a step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 1:
            self.context = trainer.strategy.engine.trace()
            self.trace = self.context.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 1:
            self.context.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_lightning_goes_on_from_a_checkpoint_exactly(tmp_path: Path) -> None:
    example = importlib.import_module("lightning_module")
    quiet = {"accelerator": "cpu", "enable_model_summary": False}

    def fit(steps: int, folder: Path, **how: Any) -> tuple[Any, Any]:
        saving = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
        watch = Watch()
        trainer = example.make(
            plain=False, folder=folder, max_steps=steps, callbacks=[saving, watch], **quiet
        )
        module = example.LanguageModel()
        trainer.fit(module, example.rows(40), **how)  # epochs of 5 steps
        return module, watch

    whole, watch = fit(10, tmp_path / "whole")
    fetched = {one.text.split()[1] for one in watch.trace.spans if one.text.startswith("fetch L")}
    assert fetched == {"L0", "L1", "L2"}
    (half,) = (tmp_path / "whole").glob("*step=5.ckpt")
    resumed, _ = fit(10, tmp_path / "whole", ckpt_path=half)
    assert resumed.losses == whole.losses[5:]
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def test_a_strategy_streams_the_one_module_that_has_parameters() -> None:
    class Two(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.other(self.one(batch)).sum()

    strategy = l2l.loops.lightning_strategy()
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    with pytest.raises(ValueError, match=r"has parameters in \['one', 'other'\]"):
        trainer.fit(Two(), torch.utils.data.DataLoader(torch.ones(4, 2)))


@pytest.mark.parametrize(
    ("precision", "link"), [("bf16-mixed", torch.bfloat16), (32, torch.float32)]
)
def test_lightnings_precision_is_the_engines(
    precision: Any, link: torch.dtype, tmp_path: Path
) -> None:
    example = importlib.import_module("lightning_module")
    quiet = {"accelerator": "cpu", "enable_checkpointing": False, "enable_model_summary": False}

    class See(lightning.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.link = inside.link(trainer.strategy.engine)

    trainer = example.make(
        plain=False,
        folder=tmp_path,
        max_steps=1,
        precision=precision,
        callbacks=[see := See()],
        **quiet,
    )
    module = example.LanguageModel()
    trainer.fit(module, example.rows(16))
    assert see.link is link
    assert next(module.parameters()).dtype is torch.float32


def test_accelerate_prepares_and_accumulates() -> None:
    example = importlib.import_module("accelerate_loop")
    expected, _ = example.train(plain=True, cpu=True)
    found, engine = example.train(plain=False, cpu=True)
    assert len(found) == 2 * tiny.STEPS
    assert found == pytest.approx(expected, abs=1e-5)
    engine.close()


# --------------------------------------------------------------------------------------------------
# The documentation

BLOCKS = (ROOT / "docs" / "trainers.md").read_text().split("```python\n")


@pytest.mark.parametrize("block", [one.partition("```")[0] for one in BLOCKS[1:]])
def test_a_recipe_of_the_documentation_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    example = importlib.import_module("lightning_module")
    settings = tiny.settings(tmp_path, use_cpu=True, max_steps=2)
    kind = TrainingArguments
    if "SFTTrainer" in block:
        kind, settings["bf16"] = trl.SFTConfig, False
    names = {
        "args": kind(**settings),
        "model": tiny.language_model(),
        "module": example.LanguageModel(),
        "dataset": tiny.texts() if "SFTTrainer" in block else clm.blocks(),
        "tokenizer": tiny.tokenizer(),
        "collate": transformers.DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False),
        "loader": example.rows(32),
        "accelerator": Accelerator(cpu=True, gradient_accumulation_steps=2),
        "l2l": l2l,
        "torch": torch,
        "transformers": transformers,
    }
    exec(compile(block, "trainers.md", "exec"), names)
