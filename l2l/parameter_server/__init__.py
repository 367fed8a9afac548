"""The parameter server: model, optimizer and waiting gradients in host memory."""

from l2l.parameter_server import device_update as device_update
from l2l.parameter_server import host_kernel as host_kernel
from l2l.parameter_server import operands as operands
from l2l.parameter_server.adafactor import Adafactor as Adafactor
from l2l.parameter_server.device_update import FlatUnit as FlatUnit
from l2l.parameter_server.host_kernel import HostKernel as HostKernel
from l2l.parameter_server.host_kernel import load as load_kernel
from l2l.parameter_server.moving import Move as Move
from l2l.parameter_server.optimizer import SGD as SGD
from l2l.parameter_server.optimizer import AdamW as AdamW
from l2l.parameter_server.optimizer import HostOptimizer as HostOptimizer
from l2l.parameter_server.optimizer import Lion as Lion
from l2l.parameter_server.optimizer import Optimizer as Optimizer
from l2l.parameter_server.optimizer import RecordGradients as RecordGradients
from l2l.parameter_server.policy import UpdatePolicy as UpdatePolicy
from l2l.parameter_server.sizing import NUM_STAGING as NUM_STAGING
from l2l.parameter_server.sizing import ROUNDING_BYTES as ROUNDING_BYTES
from l2l.parameter_server.sizing import alternatives as alternatives
from l2l.parameter_server.sizing import host_bytes as host_bytes
from l2l.parameter_server.snapshot import Image as Image
from l2l.parameter_server.snapshot import Snapshot as Snapshot
from l2l.parameter_server.store import ParameterServer as ParameterServer
from l2l.parameter_server.store import TableRows as TableRows
from l2l.parameter_server.store import UpdateOrder as UpdateOrder
from l2l.parameter_server.store import WaitingUpdate as WaitingUpdate
from l2l.parameter_server.torch_optimizer import Members as Members
from l2l.parameter_server.torch_optimizer import ServerOptimizer as ServerOptimizer
from l2l.parameter_server.torch_optimizer import groups_of as groups_of
from l2l.parameter_server.unit import Unit as Unit
from l2l.parameter_server.unit import UnitForm as UnitForm
from l2l.parameter_server.unit import nothing_like as nothing_like
from l2l.parameter_server.unit import refuse_without_weights as refuse_without_weights
from l2l.parameter_server.unit import state_name as state_name

__all__ = [
    "NUM_STAGING",
    "ROUNDING_BYTES",
    "SGD",
    "Adafactor",
    "AdamW",
    "FlatUnit",
    "HostKernel",
    "HostOptimizer",
    "Image",
    "Lion",
    "Members",
    "Move",
    "Optimizer",
    "ParameterServer",
    "RecordGradients",
    "ServerOptimizer",
    "Snapshot",
    "TableRows",
    "Unit",
    "UnitForm",
    "UpdateOrder",
    "UpdatePolicy",
    "WaitingUpdate",
    "alternatives",
    "device_update",
    "groups_of",
    "host_bytes",
    "host_kernel",
    "load_kernel",
    "nothing_like",
    "operands",
    "refuse_without_weights",
    "state_name",
]
