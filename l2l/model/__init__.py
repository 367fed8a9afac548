"""The user's model: cut into its layers and the code around them, recorded, run layer by layer."""

from l2l.model.attribution import Splitting
from l2l.model.batch import (
    IGNORED,
    LossFunction,
    Microbatch,
    Rule,
    Source,
    asking_in,
    can_join,
    compare_cut_loss,
    compare_parts,
    find_rule,
    given_loss,
    has_masks,
    join_outputs,
    join_rows,
    map_batch,
    move_batch,
    no_rows,
    num_rows,
    require_loss,
    same,
    shortened,
    some_rows,
    split_batch,
    split_into,
    take_positions,
    take_rows,
    token_length,
    trial_batch,
    turned,
    without_graph,
)
from l2l.model.beside import Beside, NotCompiledYetError
from l2l.model.captures import emit, leaves_more, open_lists, run_layer
from l2l.model.compiling import parse_backend
from l2l.model.fake_weights import FakeWeights, fake_weight
from l2l.model.format import (
    Format,
    bytes_of,
    format_of,
    is_meant,
    mean,
    refuse_unusable,
)
from l2l.model.head import (
    EVEN_ROWS,
    NOT_COUNTED,
    SLICE_PIECE_BYTES,
    Asked,
    Head,
    Pointwise,
    Question,
    Sum,
    TokenLoss,
    Words,
    add_words,
    coefficients,
    completed,
    first_sums,
    log_probabilities,
    unwind_words,
    watching,
)
from l2l.model.held import GradientsAway, Reader, hold, is_held, lent, reason_for, release
from l2l.model.host_mirror import HostMirror
from l2l.model.interception import Answers, Lookup, Readers, Reading
from l2l.model.late import Late, late
from l2l.model.layer_pass import (
    EVERYTHING,
    BackwardResult,
    Compiler,
    Gradients,
    Handed,
    LayerInputs,
    Program,
    Walked,
    leaves,
    take_gradients,
)
from l2l.model.lengths import Grouping, group_by_tokens, padded_pair
from l2l.model.modes import Mode, Modes
from l2l.model.modules import (
    CutError,
    LayerList,
    copy_tree,
    modules_kept,
)
from l2l.model.partition import Partition
from l2l.model.passing import (
    HIDDEN,
    METADATA,
    Call,
    RecordedTensor,
    Recording,
    Returns,
    State,
    first_argument,
    named_arguments,
    objects_in,
    states_of,
)
from l2l.model.quantizing import BASES, plain_values, quantize
from l2l.model.route import Key, Route
from l2l.model.splitting import Split, Whole, cutting_of, has_flat_numbers, like
from l2l.model.structures import Attribute, attributes_of, is_plain, own_numbers
from l2l.model.tiling import TILE_TOKENS, Tiles, find_pointwise
from l2l.model.trees import Part, UnitTensors
