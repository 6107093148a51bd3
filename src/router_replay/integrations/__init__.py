"""Puts replay into the trainers of other projects; one package per host."""
