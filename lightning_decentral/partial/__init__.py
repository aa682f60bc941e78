"""Structured partial backpropagation: each worker runs the backward of the top of the network only.

plan: `depth`, `freezing`, `order`, `forecast`; rule: `cut`, `measure`, `verify`, `search`, `absent`; wire:
`reducer`; binding: `strategy`, `driver`, `callbacks`.
"""
