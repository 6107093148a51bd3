"""Force, check and deliver the routes of requests inside vLLM."""
