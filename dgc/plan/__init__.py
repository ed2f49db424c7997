"""Whether it pays: a step's time and scaling efficiency for a model on a cluster, and what to do
there.
"""

from dgc.plan.advise import advise, bits
from dgc.plan.models import MODELS, Shape, buckets, load, measure
from dgc.plan.predict import INSIDE, LOCAL, NETWORKS, Local, Method, methods, predict

__all__ = [
    "INSIDE",
    "LOCAL",
    "MODELS",
    "NETWORKS",
    "Local",
    "Method",
    "Shape",
    "advise",
    "bits",
    "buckets",
    "load",
    "measure",
    "methods",
    "predict",
]
