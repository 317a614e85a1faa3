"""Turns a single-node training program into a trainer program and parameter server programs: pure
graph work.
"""

from transpiler.clip import ClipGradByGlobalNorm as ClipGradByGlobalNorm
from transpiler.clip import ClipGradByNorm as ClipGradByNorm
from transpiler.clip import ClipGradByValue as ClipGradByValue
from transpiler.distribute import DistributeTranspiler as DistributeTranspiler
from transpiler.distribute_config import DistributeTranspilerConfig as DistributeTranspilerConfig
from transpiler.optim.decayed_adagrad import DecayedAdagrad as DecayedAdagrad
from transpiler.optim.ftrl import Ftrl as Ftrl
from transpiler.plan.placement import HashName as HashName
from transpiler.plan.placement import RoundRobin as RoundRobin
from transpiler.plan.placement import SizeBalanced as SizeBalanced
from transpiler.plan.placement import slice_variable as slice_variable
from transpiler.strategy.strategy import DistributedStrategy as DistributedStrategy
from transpiler.tracing.capture import capture as capture
from transpiler.tracing.default_programs import default_main_program as default_main_program
from transpiler.tracing.default_programs import default_startup_program as default_startup_program
from transpiler.tracing.default_programs import name as name
from transpiler.tracing.default_programs import name_scope as name_scope
from transpiler.tracing.default_programs import program_guard as program_guard

__all__ = [
    "capture",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "DecayedAdagrad",
    "default_main_program",
    "default_startup_program",
    "DistributedStrategy",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "Ftrl",
    "HashName",
    "name",
    "name_scope",
    "program_guard",
    "RoundRobin",
    "SizeBalanced",
    "slice_variable",
]
