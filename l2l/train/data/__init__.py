"""From files to batches: what `l2l train` reads, and in which order a model sees it.

    reading    files and folders -> records, one by one, each with its file and line
    encoding   records -> token ids, and what is to be learnt of them
    encoders   the same for models that see whole texts
    examples   the same in a few flat tensors; which columns of records are used for what
    kept       examples that were tokenized before
    batching   examples -> batches; which ones a step gets follows from the seed and its number

Tokenizers come from outside, as objects with the face of those of transformers.
"""

from l2l.train.data.batching import (
    PADDED_TO,
    Batches,
    num_targets,
    packing_holds,
    padded_length,
    seeded,
)
from l2l.train.data.encoding import PLAIN_TEMPLATE
from l2l.train.data.examples import Examples, Form, Task, make_examples
from l2l.train.data.kept import KeptExamples
from l2l.train.data.reading import DataError, DocumentsEnd, Record, did_you_mean, read_records
