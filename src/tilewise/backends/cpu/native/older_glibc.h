// Read before every source of a library that shall run with an older glibc than this machine's (CMakeLists.txt, TILEWISE_GLIBC):
// <condition_variable> and <mutex> then do without what glibc has had only since 2.30, pthread_cond_clockwait and its like.
#pragma once
#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK
