"""The way of new weights from the policy into the engine."""
