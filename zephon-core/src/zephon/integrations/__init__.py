"""Zephon as the data of training frameworks; a module per framework, which imports it.

lightning       Trainer of Lightning

TorchTitan and Megatron have packages of their own: torchtitan-zephon and megatron-zephon.
"""
