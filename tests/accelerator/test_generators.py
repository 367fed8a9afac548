"""Random numbers of passes on a CUDA device: their own, and the bits that torch would draw."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from l2l.device import CudaDevice

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def threads() -> ModuleType:
    """reproduce/threads.py, of which a part is run here."""
    path = Path(__file__).parents[2] / "reproduce" / "threads.py"
    spec = importlib.util.spec_from_file_location("threads_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def device():
    found = CudaDevice(torch.device("cuda"))
    yield found
    found.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_no_mask_changes_beside_threads_that_draw(threads: ModuleType, compiled: bool):
    """Attention has dropout here: in a fused kernel, on the device."""
    found = threads.beside_threads("cuda", steps=50, compiled=compiled)
    assert bool(found["masks compared"]) is not compiled
    assert found["masks that differ"] == 0
    assert found["losses and weights that differ"] == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_two_engines_in_two_threads_train_as_each_alone(threads: ModuleType, compiled: bool):
    found = threads.two_engines("cuda", steps=20, compiled=compiled)
    assert found["losses and weights that differ"] == 0


def attention(backend: SDPBackend) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        heads = x.bfloat16().view(2, 4, 16, 64)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)

    return run


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in bfloat16": lambda x: F.dropout(x.bfloat16(), 0.3),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of a part": lambda x: F.dropout(x[:, 1:77].t(), 0.3),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, device="cuda"),
    "randperm": lambda x: x[torch.randperm(len(x), device="cuda")],
    "on the host": lambda x: x + torch.randn(x.shape).cuda(),
    "multinomial": lambda x: x[torch.multinomial(torch.ones(len(x), device="cuda"), 3)],
    "flash attention": attention(SDPBackend.FLASH_ATTENTION),
    "efficient attention": attention(SDPBackend.EFFICIENT_ATTENTION),
    "cudnn attention": attention(SDPBackend.CUDNN_ATTENTION),
    "attention by parts": attention(SDPBackend.MATH),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_the_bits_that_it_gives_torch(name: str, device: CudaDevice):
    x = torch.linspace(-1, 1, 8192, device="cuda").view(64, 128).requires_grad_()

    def run() -> list[Tensor]:
        output = DRAWS[name](x)
        return [output, *torch.autograd.grad(output.float().square().sum(), [x])]

    torch.manual_seed(9)
    expected = run()
    states = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    with device.private_random_state():
        device.seed(9)
        found = run()
        assert all(map(torch.equal, device.random_numbers.state(), states))
    assert torch.equal(found[0], expected[0])
    # Fused attention adds gradients up in any order.
    assert torch.allclose(found[1], expected[1], rtol=1e-2, atol=1e-2)
    if "attention" not in name:
        assert torch.equal(found[1], expected[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


def test_recurrent_layers_repeat_their_masks(device: CudaDevice):
    recurrent = nn.LSTM(32, 32, 3, dropout=0.5).cuda()
    x = torch.randn(7, 4, 32, device="cuda")
    found = []
    with device.private_random_state():
        for seed in (1, 2, 1):
            device.seed(seed)
            found.append(recurrent(x)[0].detach())
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_their_masks(reentrant: bool, device: CudaDevice):
    """The backward pass is on a thread of autograd's."""
    x = torch.linspace(-1, 1, 4096, device="cuda", requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x), 0.4) * torch.rand(x.shape).cuda()

    callers = torch.cuda.get_rng_state()
    gradients = []
    for run in (inner, lambda x: checkpoint(inner, x, use_reentrant=reentrant)):
        x.grad = None
        with device.private_random_state():
            device.seed(3)
            run(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert torch.equal(torch.cuda.get_rng_state(), callers)
