// libhiprtc.so over NVRTC. HIP's options become NVRTC's; a code object is a cubin.
#include <nvrtc.h>
#include <string>
#include <vector>

#define HIPRTC_EXPORT extern "C" __attribute__((visibility("default")))

HIPRTC_EXPORT const char* hiprtcGetErrorString(int result) { return nvrtcGetErrorString((nvrtcResult)result); }
HIPRTC_EXPORT int hiprtcVersion(int* major, int* minor) { return nvrtcVersion(major, minor); }
HIPRTC_EXPORT int hiprtcCreateProgram(nvrtcProgram* program, const char* source, const char* name, int n_headers,
                                      const char** headers, const char** names) {
  return nvrtcCreateProgram(program, source, name, n_headers, headers, names);
}
HIPRTC_EXPORT int hiprtcDestroyProgram(nvrtcProgram* program) { return nvrtcDestroyProgram(program); }
HIPRTC_EXPORT int hiprtcCompileProgram(nvrtcProgram program, int n_options, const char** options) {
  const std::string arch = "--offload-arch=";
  std::vector<std::string> kept;
  for (int i = 0; i < n_options; ++i) {
    const std::string option = options[i];
    if (option.rfind(arch, 0) == 0) kept.push_back("--gpu-architecture=" + option.substr(arch.size()));
    if (option == arch + "sm_90") kept.back() += "a";  // with what no later card has: wgmma
    if (option.rfind("-D", 0) == 0 || option.rfind("-std=", 0) == 0) kept.push_back(option);
    if (option == "-ffp-contract=off") kept.push_back("--fmad=false");
  }
  std::vector<const char*> words;
  for (const std::string& option : kept) words.push_back(option.c_str());
  return nvrtcCompileProgram(program, (int)words.size(), words.data());
}
HIPRTC_EXPORT int hiprtcGetProgramLogSize(nvrtcProgram program, size_t* n_bytes) {
  return nvrtcGetProgramLogSize(program, n_bytes);
}
HIPRTC_EXPORT int hiprtcGetProgramLog(nvrtcProgram program, char* log) { return nvrtcGetProgramLog(program, log); }
HIPRTC_EXPORT int hiprtcGetCodeSize(nvrtcProgram program, size_t* n_bytes) {
  return nvrtcGetCUBINSize(program, n_bytes);
}
HIPRTC_EXPORT int hiprtcGetCode(nvrtcProgram program, char* code) { return nvrtcGetCUBIN(program, code); }
