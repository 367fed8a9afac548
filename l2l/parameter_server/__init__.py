"""The parameter server: model, optimizer and waiting gradients in host memory."""

from l2l.parameter_server.optimizer import (
    SGD as SGD,
)
from l2l.parameter_server.optimizer import (
    AdamW as AdamW,
)
from l2l.parameter_server.optimizer import (
    HostOptimizer as HostOptimizer,
)
from l2l.parameter_server.optimizer import (
    RecordGradients as RecordGradients,
)
from l2l.parameter_server.optimizer import (
    ServerOptimizer as ServerOptimizer,
)
from l2l.parameter_server.optimizer import (
    adopt as adopt,
)
from l2l.parameter_server.optimizer import (
    make_groups as make_groups,
)
from l2l.parameter_server.store import (
    ParameterServer as ParameterServer,
)
from l2l.parameter_server.store import (
    UpdateOrder as UpdateOrder,
)
