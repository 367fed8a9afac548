"""The public face in a few seconds: run this first."""

import torch
from families import build_llama, causal_batch

import l2l


def test_train_evaluate_predict_and_go_on_without_the_engine() -> None:
    model = build_llama()
    batch = causal_batch(6)
    with l2l.Engine(
        model, optimizer=l2l.AdamW(lr=1e-2), device="cpu", microbatch_size=2, seed=0
    ) as engine:
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.9**step)
        before = engine.evaluate(batch)
        reports = []
        for _ in range(8):
            reports.append(engine.step(batch))
            scheduler.step()
        after = engine.evaluate(batch)
        logits = engine.predict(batch).logits
        print(engine.plan)
        print(reports[-1])
    assert after < before - 0.5
    assert reports[-1].loss < reports[0].loss
    assert reports[0].gradient_norm > 0
    assert reports[0].num_tokens == batch["input_ids"].numel()
    assert not reports[0].skipped

    with torch.no_grad():
        found = model.eval()(**batch)
    assert abs(found.loss.item() - after) < 0.05  # in float32 here, in bfloat16 there
    torch.testing.assert_close(logits.float(), found.logits, rtol=0.1, atol=0.1)


def test_one_step_in_float32_is_one_step_of_torch_bit_by_bit() -> None:
    plain, model = build_llama(), build_llama()
    batch = causal_batch(3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    loss = plain(**batch).loss
    loss.backward()
    optimizer.step()

    adopted = torch.optim.AdamW(model.parameters(), lr=1e-2)
    execution = l2l.Execution(kernel="readable")
    settings = {"device": "cpu", "precision": "float32", "execution": execution}
    with l2l.Engine(model, optimizer=adopted, **settings) as engine:
        assert engine.step(batch).loss == loss.item()
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
