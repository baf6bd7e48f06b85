"""What a TPU's compiler wants to know on a machine without a TPU."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
# Else a lock lets one process at a time load the compiler.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
