"""Whether it pays: a step's time and scaling efficiency for a model on a cluster, and what to do there."""

from dgc.plan.advise import MOST, NEARLY, OFFERED, SPARSITIES, WORTH, Advice, advise, bits
from dgc.plan.answer import Plan, draw, plan
from dgc.plan.buckets import buckets, dense_buckets
from dgc.plan.models import MODELS, Loaded, Shape, load, measure
from dgc.plan.predict import (
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

__all__ = ["CPU", "DGC", "INSIDE", "LARGEST", "LOCAL", "MODELS", "MOST", "NEARLY", "NETWORKS", "OFFERED",
           "SPARSITIES", "WORTH", "Advice", "Loaded", "Local", "Method", "Plan", "Prediction", "Shape",
           "advise", "bits", "buckets", "dense_buckets", "draw", "load", "measure",
           "methods", "of_size", "plan", "predict", "sizes"]
