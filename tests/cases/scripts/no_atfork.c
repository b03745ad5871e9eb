/* Loaded before libc: there is no memory for a fork handler of the library's (pthread_atfork asks this function for it). */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *module);

int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *module)
{
    int (*real)(void (*)(void), void (*)(void), void (*)(void), void *) =
        (int (*)(void (*)(void), void (*)(void), void (*)(void), void *))dlsym(RTLD_NEXT, "__register_atfork");
    Dl_info info;
    if (child && dladdr((void *)child, &info) && info.dli_fname && strstr(info.dli_fname, "_crew")) return ENOMEM;
    return real(prepare, parent, child, module);
}
