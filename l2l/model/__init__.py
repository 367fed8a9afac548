"""The user's model: cut into its layers and the code around them, recorded, run layer by layer."""

from l2l.model.batch import (
    Microbatch,
    has_rows,
    join_outputs,
    map_batch,
    move_batch,
    no_rows,
    num_rows,
    same,
    split_batch,
    split_into,
    take_rows,
    token_length,
)
from l2l.model.compiled_layer import (
    EVERYTHING,
    Compiler,
    Handed,
    Program,
    parse_backend,
    why_not_compiled,
)
from l2l.model.fake_weights import FakeWeights, fake_weight
from l2l.model.given_objects import State, named_arguments, objects_in, states_of
from l2l.model.held import (
    Reader,
    hold,
    is_held,
    lend,
    reason_for,
    refuse_replaced,
    registered,
    release,
    take_back,
)
from l2l.model.host_mirror import HostMirror
from l2l.model.interception import Answers, Head, Lookup, Readers, Reading, Sum
from l2l.model.layer_pass import (
    BackwardResult,
    LayerInputs,
    Walked,
    leaves,
    take_gradients,
    weigh_gradient,
    weighed,
)
from l2l.model.loss import (
    IGNORED,
    LossFunction,
    Measured,
    Rule,
    compare_cut_loss,
    find_rule,
    require_loss,
    trial_batch,
)
from l2l.model.modules import (
    CutError,
    attributes_of,
    copy_tree,
    is_plain,
    modules_kept,
    own_numbers,
)
from l2l.model.partition import Partition
from l2l.model.passing import Call, RecordedTensor, Recording, Returns, first_argument
from l2l.model.skeleton import UnitTensors
