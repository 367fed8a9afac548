"""Files of tensors, and one way to replace files and folders that survives a power cut."""

from l2l.files.cache import cache_folder, own_source
from l2l.files.replacing import (
    REPLACED,
    SUFFIXES,
    beside,
    empty_folder,
    recover,
    remove_folder,
    replace_folder,
    sync,
    whole_folder,
    write_file,
)
from l2l.files.tensor_file import (
    TensorFileError,
    TensorKind,
    TensorReader,
    Written,
    check_file,
    check_size,
    kinds_of,
    open_to_read,
    write_tensors,
)
