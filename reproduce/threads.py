"""Train beside threads that draw random numbers, and see that no dropout mask changes.

    python reproduce/threads.py --device cpu
    python reproduce/threads.py --device cuda

Trains a small model with dropout around, in and between its layers, once alone and once beside two
threads that draw from torch's default generators, each ten thousand times a second. Every mask is
noted when a layer runs forward and when it is recomputed, and must be the same; losses and weights
must be those of the run alone, bit by bit; and the numbers that the threads have drawn must be
those that a program without an engine draws. On an accelerator that holds but for a thread that
draws from its default generator in the microseconds in which a fused kernel borrows it: these are
counted apart. Then the same with two engines, in two threads, each compared with itself alone.
Compiled layers note no masks: their losses and weights tell. Ends with status 1 if any differs.
"""

import argparse
import collections
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import l2l

WIDTH, HEADS, CLASSES, LENGTH, ROWS, SIZE = 32, 2, 7, 8, 4, 2
PROBABILITY = 0.3
NUM_LAYERS, NUM_TAIL = 3, 1
SWITCH_SECONDS = 1e-4  # after which another thread has its turn; Python's own are 5e-3
PAUSE_SECONDS = 2e-5  # of a thread between two draws; the system makes it about 1e-4
FOUR = 4  # numbers that a thread draws at a time
MAX_NOTED = 50_000  # draws of a thread: more would fill memory

Masks = dict[tuple[int, str], list[Tensor]]


class Layer(nn.Module):
    """Attention with dropout, and a product with dropout; notes its masks."""

    masks: ClassVar[Masks] = collections.defaultdict(list)
    notes = False

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """A hidden state for a hidden state."""
        rows, length, _ = hidden.shape
        parts = self.inward(hidden).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        p = PROBABILITY if self.training else 0.0
        found = F.scaled_dot_product_attention(*parts.unbind(), dropout_p=p)
        if Layer.notes:  # what is dropped shows in what comes out: the input is the same
            self.note("attention", found)
        product = self.outward(found.transpose(1, 2).reshape(hidden.shape))
        dropped = F.dropout(product, p, self.training)
        if Layer.notes:
            self.note("product", dropped)
        return hidden + dropped

    def note(self, kind: str, value: Tensor) -> None:
        """Keep a mask."""
        if type(value) is Tensor and not value.is_meta:  # a plan counts costs with neither
            Layer.masks[self.number, kind].append(value.detach().clone())


class Model(nn.Module):
    """An embedding with dropout, layers, a head with dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        hidden = F.dropout(self.embedding(ids), PROBABILITY, self.training)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(F.dropout(hidden, PROBABILITY, self.training))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build() -> Model:
    """The same model each time, whatever others draw."""
    model, generator = Model(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def train(
    model: Model, device: str, *, steps: int, compiled: bool | str = False, seed: int = 3
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights after some steps; some of the layers are streamed, some stay."""
    ids = torch.randint(0, 11, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=1e-3),
        device=device,
        microbatch_size=SIZE,
        precision="float32" if device == "cpu" else "bfloat16",
        compile=compiled,
        seed=seed,
        execution=l2l.Execution(overrides={"num_tail": NUM_TAIL, "keep": 0.0}),
        prove=False,  # which runs the layers as well, and would note their masks
    ) as engine:
        losses = [engine.step({"ids": ids, "labels": ids % CLASSES}).loss for _ in range(steps)]
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


class Drawers:
    """Threads that draw from the default generators while a block runs."""

    def __init__(self, devices: list[str]) -> None:
        self.devices = devices
        self.noted: list[list[Tensor]] = [[] for _ in devices]
        self.numbers = [0] * len(devices)  # of draws, noted or not

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw until the block ends."""
        stop = threading.Event()

        def draw(which: int) -> None:
            device, noted = self.devices[which], self.noted[which]
            while not stop.is_set():
                drawn = torch.rand(FOUR, device=device)
                self.numbers[which] += 1
                if len(noted) < MAX_NOTED:
                    noted.append(drawn)
                time.sleep(PAUSE_SECONDS)

        threads = [threading.Thread(target=draw, args=(i,)) for i in range(len(self.devices))]
        torch.manual_seed(11)
        switching = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            sys.setswitchinterval(switching)
            for thread in threads:
                thread.join()

    def num_different(self) -> dict[str, int]:
        """How many of the noted numbers are not among those that are drawn alone, by device."""
        torch.manual_seed(11)
        different = {}
        for device in dict.fromkeys(self.devices):
            own = [i for i, one in enumerate(self.devices) if one == device]
            number = sum(self.numbers[i] for i in own)
            alone = torch.stack([torch.rand(FOUR, device=device) for _ in range(number)])
            counts = collections.Counter(map(tuple, alone.tolist()))
            found = torch.stack([one for i in own for one in self.noted[i]])
            different[device] = sum(not counts[tuple(one)] for one in found.tolist())
        return different


def compare_masks(steps: int) -> tuple[int, int]:
    """Masks of forward passes that were recomputed, and how many of them were other masks then.

    In every step a streamed layer runs all microbatches forward, then all of them again.
    """
    compared = different = 0
    number = ROWS // SIZE
    for (layer, _), masks in Layer.masks.items():
        own = masks[-2 * number * steps :]  # the first are of a trial
        if layer >= NUM_LAYERS - NUM_TAIL or len(own) < 2 * number * steps:
            continue
        for first in range(0, len(own), 2 * number):
            forward, again = own[first : first + number], own[first + number : first + 2 * number]
            compared += number
            different += sum(not torch.equal(*pair) for pair in zip(forward, again, strict=True))
    return compared, different


def differ(
    found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]
) -> int:
    """How many losses and weights differ."""
    losses = sum(one != other for one, other in zip(found[0], expected[0], strict=True))
    return losses + sum(
        not torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)
    )


def beside_threads(device: str, *, steps: int, compiled: bool | str) -> dict[str, int]:
    """A run beside threads that draw numbers, compared with the same run alone."""
    expected = train(build(), device, steps=steps, compiled=compiled)
    model = build()  # which draws as well
    Layer.masks.clear()
    Layer.notes = not compiled
    drawers = Drawers(["cpu", device])
    try:
        with drawers.drawing():
            found = train(model, device, steps=steps, compiled=compiled)
    finally:
        Layer.notes = False
    compared, different = compare_masks(steps)
    drawn = drawers.num_different()
    return {
        "steps": steps,
        "masks compared": compared,
        "masks that differ": different,
        "losses and weights that differ": differ(found, expected),
        "draws of the threads": sum(drawers.numbers),
        "draws on the host that differ": drawn["cpu"],
        "drawn while borrowed": drawn.get("cuda", 0),
    }


def two_engines(device: str, *, steps: int, compiled: bool | str) -> dict[str, int]:
    """Two runs in two threads, compared with each alone."""
    seeds = (3, 4)
    expected = [train(build(), device, steps=steps, compiled=compiled, seed=seed) for seed in seeds]
    found: dict[int, tuple[list[float], list[Tensor]]] = {}

    def work(seed: int) -> None:
        found[seed] = train(build(), device, steps=steps, compiled=compiled, seed=seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    different = [
        differ(found[seed], one) if seed in found else steps
        for seed, one in zip(seeds, expected, strict=True)
    ]
    return {"steps": 2 * steps, "losses and weights that differ": sum(different)}


def main() -> int:
    """Print a table; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument(
        "--compile",
        choices=["both", "no", "yes"],
        default="both",
        help="layers as they are, through torch.compile, or both in turn; on the CPU as they are",
    )
    words = parser.parse_args()
    kinds = {"both": [False, True], "no": [False], "yes": [True]}[words.compile]
    if words.device == "cpu":
        kinds = [False]
    rows = []
    for compiled in kinds:
        layers = "compiled" if compiled else "as they are"
        for name, measure in (("threads that draw", beside_threads), ("an engine", two_engines)):
            start = time.perf_counter()
            found = measure(words.device, steps=words.steps, compiled=compiled)
            rows.append({"device": words.device, "layers": layers, "beside": name, **found})
            rows[-1]["seconds"] = round(time.perf_counter() - start)
    titles = list(rows[0])
    print(" | ".join(titles))
    for row in rows:
        print(" | ".join(str(row.get(title, "")) for title in titles))
    wrong = sum(int(row.get(title, 0)) for row in rows for title in titles if "differ" in title)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
