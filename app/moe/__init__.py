"""Mixture of experts: router, permutation, experts, dispatch between ranks, expert replicas
(ECHO).
"""
