# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Kernels of Hybrid HiSparse: residency lookup, hot-buffer LRU, row fetch, staging.

The modules import torch, triton, the standard library and each other, nothing else,
so they run and are tested without vLLM. Every module holds kernels, launchers that
neither allocate nor read device values (D25), and a torch reference.
"""
