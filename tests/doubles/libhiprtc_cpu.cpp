// libhiprtc.so without a GPU: "compiles for the device" by handing the kernel text to g++ behind cpu_shim.h.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#define HIPRTC_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
enum { kSuccess = 0, kInvalidInput = 3, kCompilation = 6 };
struct File {
  std::string name, text;
};
struct Program {
  std::vector<File> files;  // the source first
  std::string log, code;
};

void write_file(const std::filesystem::path& path, const std::string& text) { std::ofstream(path) << text; }
std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
std::string shell_word(const std::string& word) {
  std::string out = "'";
  for (char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}
}  // namespace

HIPRTC_EXPORT const char* hiprtcGetErrorString(int result) {
  return result == kSuccess ? "HIPRTC_SUCCESS" : result == kCompilation ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR";
}
HIPRTC_EXPORT int hiprtcVersion(int* major, int* minor) {
  *major = __GNUC__;
  *minor = __GNUC_MINOR__;
  return kSuccess;
}
HIPRTC_EXPORT int hiprtcCreateProgram(Program** program, const char* source, const char* name, int n_headers,
                                      const char** headers, const char** names) {
  *program = new Program{{{name, source}}, {}, {}};
  for (int i = 0; i < n_headers; ++i) (*program)->files.push_back({names[i], headers[i]});
  return kSuccess;
}
HIPRTC_EXPORT int hiprtcDestroyProgram(Program** program) {
  delete *program;
  return kSuccess;
}
HIPRTC_EXPORT int hiprtcCompileProgram(Program* program, int n_options, const char** options) {
  std::string folder = (std::filesystem::temp_directory_path() / "hiprtc-double-XXXXXX").string();
  if (!mkdtemp(folder.data())) return kInvalidInput;
  const std::filesystem::path root = folder;
  for (const File& file : program->files) write_file(root / file.name, file.text);
  // fma contraction and the rest are as the options ask; -march=native only serves speed.
  std::string command = "cd " + shell_word(folder) +
                        " && g++ -x c++ -O2 -march=native -fno-gnu-unique -fvisibility=hidden -shared -fPIC -pthread"
                        " -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter -DRL_CPU -I. -include " +
                        shell_word(SHIM_HEADER);
  for (int i = 0; i < n_options; ++i) {
    const std::string option = options[i];
    if (option.rfind("-D", 0) == 0 || option.rfind("-std=", 0) == 0 || option.rfind("-ffp-contract=", 0) == 0)
      command += " " + shell_word(option);
  }
  command += " -o code.so " + shell_word(program->files[0].name) + " >log 2>&1";
  const int status = system(command.c_str());
  program->log = read_file(root / "log");
  program->code = read_file(root / "code.so");
  std::filesystem::remove_all(root);
  return status == 0 ? kSuccess : kCompilation;
}
HIPRTC_EXPORT int hiprtcGetProgramLogSize(Program* program, size_t* n_bytes) {
  *n_bytes = program->log.size() + 1;
  return kSuccess;
}
HIPRTC_EXPORT int hiprtcGetProgramLog(Program* program, char* log) {
  program->log.copy(log, program->log.size());
  log[program->log.size()] = 0;
  return kSuccess;
}
HIPRTC_EXPORT int hiprtcGetCodeSize(Program* program, size_t* n_bytes) {
  *n_bytes = program->code.size();
  return kSuccess;
}
HIPRTC_EXPORT int hiprtcGetCode(Program* program, char* code) {
  program->code.copy(code, program->code.size());
  return kSuccess;
}
