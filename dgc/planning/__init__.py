"""Whether it pays: a step's time and scaling efficiency for a model on a cluster, and what to do there."""

from dgc.planning.advise import MOST, NEARLY, OFFERED, SPARSITIES, WORTH, Advice, advise, bits
from dgc.planning.answer import Plan, draw, plan
from dgc.planning.buckets import buckets, dense_buckets
from dgc.planning.models import MODELS, NAME, Loaded, Shape, TheirError, callable_named, load, measure
from dgc.planning.predict import (
    CPU,
    DGC,
    INSIDE,
    LARGEST,
    LOCAL,
    NETWORKS,
    Local,
    Method,
    Prediction,
    methods,
    of_size,
    predict,
    sizes,
)

__all__ = ["CPU", "DGC", "INSIDE", "LARGEST", "LOCAL", "MODELS", "MOST", "NAME", "NEARLY", "NETWORKS", "OFFERED",
           "SPARSITIES", "WORTH", "Advice", "Loaded", "Local", "Method", "Plan", "Prediction", "Shape",
           "TheirError", "advise", "bits", "buckets", "callable_named", "dense_buckets", "draw", "load", "measure",
           "methods", "of_size", "plan", "predict", "sizes"]
