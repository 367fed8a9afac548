"""The user's model: cut into its layers and the code around them, recorded, run layer by layer."""

from l2l.model.batch import (
    Microbatch,
    join_outputs,
    move_batch,
    no_rows,
    num_rows,
    split_batch,
    split_into,
    take_rows,
    token_length,
)
from l2l.model.comparison import same, same_leaves
from l2l.model.compiled_layer import EVERYTHING, Compiler, Handed, Program, parse_backend
from l2l.model.configs import configs_of, takes_use_cache, without_cache
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
from l2l.model.layer_list import CutError
from l2l.model.layer_pass import (
    BackwardResult,
    LayerInputs,
    Walked,
    backward_layer,
    forward_layer,
    leaves,
    take_gradients,
    unwind_layer,
    walk_layer,
    weigh_gradient,
    weighed,
)
from l2l.model.loss import (
    IGNORED,
    LossFunction,
    Measured,
    Rule,
    compare_cut_loss,
    count,
    find_rule,
    ignored_targets,
    num_elements,
    output_shares,
    refuse_uncountable,
    require_loss,
    total_count,
    trial_batch,
)
from l2l.model.module_copy import copy_tree
from l2l.model.partition import Partition
from l2l.model.passing import Returns, first_argument
from l2l.model.recording import Call, RecordedTensor, Recording
from l2l.model.skeleton import UnitTensors
from l2l.model.structures import attributes_of, is_plain, own_numbers
