"""Files of tensors, and one way to replace files and folders that survives a power cut."""

from l2l.files.replacing import (
    DELETED,
    PARTIAL,
    REPLACED,
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
    Entry,
    TensorFile,
    TensorFileError,
    Written,
    check_file,
    check_size,
    open_to_read,
    write_tensors,
)
