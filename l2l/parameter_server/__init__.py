"""The parameter server: model, optimizer and waiting gradients in host memory."""

from l2l.parameter_server.adafactor import REVISED_BYTES, REVISED_PIECE, Adafactor
from l2l.parameter_server.eight_bit import num_blocks
from l2l.parameter_server.forms import (
    NUM_STAGING,
    OUTER,
    ROUNDING_BYTES,
    UnitForm,
    alternatives,
    formats_in,
    forms_of,
    host_bytes,
    state_name,
    units_of,
)
from l2l.parameter_server.host_gradients import HostGradients
from l2l.parameter_server.host_kernel import HostKernel, working_threads
from l2l.parameter_server.host_kernel import load as load_kernel
from l2l.parameter_server.host_memory import Arena, HostBudget, available_bytes
from l2l.parameter_server.inventory import Inventory
from l2l.parameter_server.layout import (
    ALIGNMENT_BYTES,
    ALIGNMENT_ELEMENTS,
    FlatLayout,
    gathered,
    round_up,
    rows_of_slice,
)
from l2l.parameter_server.muon import Muon, divided
from l2l.parameter_server.named import OPTIMIZERS
from l2l.parameter_server.optimizer import (
    DeviceWork,
    FlatUnit,
    HostOptimizer,
    Optimizer,
    StateKind,
    Update,
    UpdateOrder,
)
from l2l.parameter_server.optimizers import (
    SGD,
    AdamW,
    Lion,
    RecordGradients,
    ScheduleFreeAdamW,
)
from l2l.parameter_server.policy import UpdatePolicy
from l2l.parameter_server.precision import DTYPES, LossScale, PrecisionPolicy, join_master
from l2l.parameter_server.snapshot import NUM_WRITERS, Image, Snapshot
from l2l.parameter_server.store import (
    ParameterServer,
    check_settings,
    exchange_averages,
    lost_weights,
    values_of,
)
from l2l.parameter_server.table_rows import TableRows
from l2l.parameter_server.torch_optimizer import (
    GivenOptimizer,
    Members,
    ServerOptimizer,
    groups_of,
)
from l2l.parameter_server.unit import (
    Move,
    Unit,
    exchange,
    kinds_in,
    nothing_like,
    refuse_without_weights,
)
from l2l.parameter_server.units_on_disk import (
    ALL_PARTS,
    BUFFERS,
    PLACES,
    Part,
    UnitsOnDisk,
    block_bytes,
    buffer_bytes,
    written_bytes,
)
from l2l.parameter_server.waiting import Progress, WaitingUpdate
