/* For the build that counts lines: each extension has its counts to itself and writes them when the process ends by itself.
 * A process that ends by _exit asks for it before (reached.py). */
extern void __gcov_dump(void);
__attribute__((visibility("default"))) void shmkv_dump_counts(void);
void shmkv_dump_counts(void) { __gcov_dump(); }
