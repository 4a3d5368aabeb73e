"""Shares devices between trainer and engine: phases, offloading and the memory ledger."""
