"""Real MoE routing replayed as traffic between an engine process and a trainer process.

`engine.py` and `trainer.py` are also the shortest complete examples of the writing and the reading side.
"""
