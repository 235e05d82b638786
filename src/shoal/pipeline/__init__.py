"""One model over several devices: schedules as programs, stages, and how they run.

The schedules are here, and load without torch; ``shoal.pipeline.run`` trains.
"""

from shoal.core.technique import SCHEDULES, Schedule
from shoal.pipeline.schedule import Pipeline

__all__ = ["SCHEDULES", "Pipeline", "Schedule"]
