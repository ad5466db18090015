from .comparison import compare as compare
from .plan.machine import probe as probe
from .policy import Plan as Plan
from .policy import Policy as Policy
from .session import Session as Session
from .step.scaler import LossScaler as LossScaler
from .task import Task as Task

__all__ = ["LossScaler", "Plan", "Policy", "Session", "Task", "__version__", "compare", "probe"]

__version__: str
