"""The parameter server: model, optimizer and waiting gradients in host memory."""

from l2l.parameter_server.adafactor import REVISED_BYTES, REVISED_PIECE, Adafactor
from l2l.parameter_server.coefficients import AdamWUpdate, LionUpdate, SGDUpdate
from l2l.parameter_server.device_update import FlatUnit
from l2l.parameter_server.division import forms_of, units_of
from l2l.parameter_server.eight_bit import num_blocks
from l2l.parameter_server.host_kernel import HostKernel, working_threads
from l2l.parameter_server.host_kernel import load as load_kernel
from l2l.parameter_server.host_memory import Arena, HostBudget, available_bytes
from l2l.parameter_server.layout import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, FlatLayout, round_up
from l2l.parameter_server.moving import Move
from l2l.parameter_server.operands import EightBitMoments, Moments, SplitWeight
from l2l.parameter_server.optimizer import (
    SGD,
    AdamW,
    HostOptimizer,
    Lion,
    Optimizer,
    RecordGradients,
    Update,
)
from l2l.parameter_server.optimizer_names import OPTIMIZERS
from l2l.parameter_server.policy import UpdatePolicy
from l2l.parameter_server.precision import DTYPES, LossScale, PrecisionPolicy, join_master
from l2l.parameter_server.sizing import NUM_STAGING, ROUNDING_BYTES, alternatives, host_bytes
from l2l.parameter_server.snapshot import NUM_WRITERS, Image, Snapshot
from l2l.parameter_server.store import ParameterServer
from l2l.parameter_server.torch_optimizer import Members, ServerOptimizer, groups_of
from l2l.parameter_server.unit import (
    Unit,
    UnitForm,
    exchange,
    nothing_like,
    refuse_without_weights,
    state_name,
)
from l2l.parameter_server.waiting import TableRows, UpdateOrder, WaitingUpdate
