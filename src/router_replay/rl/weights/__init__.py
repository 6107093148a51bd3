"""Transfer new weights from the policy to the engine."""
