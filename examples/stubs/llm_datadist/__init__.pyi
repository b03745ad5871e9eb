# For type checkers: what programs import as llm_datadist is shmkv.
from shmkv import *
