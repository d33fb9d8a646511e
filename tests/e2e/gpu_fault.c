// A GPU that fails for good, for gpu_server.py: loaded into an unchanged server by LD_PRELOAD, it waits for the file that
// LOUPE_TEST_GPU_FAULT names and then runs a kernel of its own in the process's context, which stores where no memory is.
// From then on every call on the device fails, as after a fault of the server's own.
//   cc -shared -fPIC -O1 -o gpu_fault.so gpu_fault.c -ldl -lpthread
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char kKernel[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry fail() { .reg .b64 %rd<2>; .reg .b32 %r<2>; mov.u64 %rd1, 4096; mov.u32 %r1, 7; st.global.u32 [%rd1], %r1; ret; }\n";

static void Fail(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return;
  int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
  int (*retain)(void**, int) = (int (*)(void**, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
  int (*use)(void*) = (int (*)(void*))dlsym(driver, "cuCtxSetCurrent");
  int (*load)(void**, const void*) = (int (*)(void**, const void*))dlsym(driver, "cuModuleLoadData");
  int (*find)(void**, void*, const char*) = (int (*)(void**, void*, const char*))dlsym(driver, "cuModuleGetFunction");
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) =
      (int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**))dlsym(
          driver, "cuLaunchKernel");
  int (*wait)(void) = (int (*)(void))dlsym(driver, "cuCtxSynchronize");
  void *context, *module, *kernel;
  int code = init(0);
  if (!code) code = retain(&context, 0);
  if (!code) code = use(context);
  if (!code) code = load(&module, kKernel);
  if (!code) code = find(&kernel, module, "fail");
  if (!code) code = launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
  if (code) fprintf(stderr, "gpu_fault: the failing kernel was not launched, code %d\n", code);
  if (!code) fprintf(stderr, "gpu_fault: the device now says %d\n", wait());
}

static void* Watch(void* file) {
  while (access(file, F_OK) != 0) usleep(10000);
  Fail();
  return NULL;
}

__attribute__((constructor)) static void Start(void) {
  pthread_t thread;
  char* file = getenv("LOUPE_TEST_GPU_FAULT");
  if (file && pthread_create(&thread, NULL, Watch, file) == 0) pthread_detach(thread);
}
