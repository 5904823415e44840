// Included before every source by setup.py. Binds functions that newer systems have under a newer version to the version
// that every glibc since 2.17 (and libstdc++ since GCC 4.8) has under it, so that a wheel built on a new system loads on an
// old one. They are the same functions; `make wheel` checks what is left with auditwheel, and fails on a name that is missing
// here.

#pragma once

#if defined(__linux__) && defined(__x86_64__)
#include <features.h>
#if defined(__GLIBC__)
#define PACELINE_OLD(name, version) __asm__(".symver " name "," name "@" version)
PACELINE_OLD("log", "GLIBC_2.2.5");
PACELINE_OLD("pthread_create", "GLIBC_2.2.5");
PACELINE_OLD("pthread_detach", "GLIBC_2.2.5");
PACELINE_OLD("pthread_mutex_trylock", "GLIBC_2.2.5");
PACELINE_OLD("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11");
#undef PACELINE_OLD
#endif
#endif
