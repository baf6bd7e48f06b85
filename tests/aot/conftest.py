"""What compilers for TPUs and GPUs want to know on a machine without one."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
# Else a lock lets one process at a time load the compiler.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Else the plugin looks for the libraries that run what it compiles.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
