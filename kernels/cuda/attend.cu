// Which attention kernel takes which rows.
#include "kernels/cuda/cuda_ops.h"

#include "kernels/check.h"

namespace loupe::cuda {

void AttendCuda(const AttendArgs& args, CudaContext context) {
  const int64_t rows = args.q.rows(), prompt = args.prompt_rows, dim = args.q.shape[2];
  const int64_t groups = args.visible_begin.shape[1], heads = args.q.shape[1] / groups;
  LOUPE_CHECK(dim > 0 && dim % 8 == 0 && dim <= 256) << "head size " << dim << " is not a multiple of 8 up to 256";
  LOUPE_CHECK(args.q.shape[1] % groups == 0 && heads <= 16)
      << args.q.shape[1] << " query heads, " << groups << " kv heads";
  LOUPE_CHECK(prompt >= 0 && prompt <= rows) << prompt << " of " << rows << " rows";
  const bool fast = !context.exact && (dim == 64 || dim == 128);
  const bool coded = fast && args.coded && AttendCodedIsBuilt(context.arch);
  if (prompt > 0) {
    if (coded) {
      AttendCoded(args, 0, prompt, context);  // row by row: the codes are in the L2 cache after the first
    } else if (fast && !args.coded && AttendPromptIsBuilt(context.arch, static_cast<int>(heads))) {
      AttendPrompt(args, prompt, context);
    } else {
      AttendPlain(args, 0, prompt, context);
    }
  }
  if (rows == prompt) return;
  const bool probabilities = args.page_mass.defined() || args.entry_probability.defined();
  LOUPE_CHECK(!probabilities || rows * args.q.shape[1] <= context.workspace->row_lse_floats)
      << rows << " rows ask for probabilities, there is room for "
      << context.workspace->row_lse_floats / args.q.shape[1];
  if (coded) {
    AttendCoded(args, prompt, rows - prompt, context);
  } else if (fast && !args.coded) {
    AttendDecode(args, prompt, rows - prompt, context);
  } else {
    AttendPlain(args, prompt, rows - prompt, context);
  }
  if (probabilities) AttendProbabilities(args, prompt, rows - prompt, context);
}

}  // namespace loupe::cuda
