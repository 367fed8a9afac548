"""From files to batches: what `l2l train` reads, and in which order a model sees it.

    reading    files and folders -> records, one by one, each with its file and line
    examples   records -> token ids, with what is to be learnt of them, in a few flat tensors
    batching   examples -> batches; which ones a step gets follows from the seed and its number

Tokenizers come from outside, as objects with the face of those of transformers.
"""

from l2l.train.data.batching import Batches as Batches
from l2l.train.data.batching import num_targets as num_targets
from l2l.train.data.batching import packing_holds as packing_holds
from l2l.train.data.columns import Columns as Columns
from l2l.train.data.columns import Task as Task
from l2l.train.data.encoding import PLAIN_TEMPLATE as PLAIN_TEMPLATE
from l2l.train.data.examples import Examples as Examples
from l2l.train.data.examples import Form as Form
from l2l.train.data.examples import Statistics as Statistics
from l2l.train.data.examples import make_examples as make_examples
from l2l.train.data.reading import DataError as DataError
from l2l.train.data.reading import DocumentsEnd as DocumentsEnd
from l2l.train.data.reading import Record as Record
from l2l.train.data.reading import did_you_mean as did_you_mean
from l2l.train.data.reading import read_records as read_records
