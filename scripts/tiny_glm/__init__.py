# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What a tiny GLM consists of: sizes and configuration, weights, tokenizer.

Needs numpy and nothing else.
"""
