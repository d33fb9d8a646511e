// A reserved step: which rows go where, which pages were taken for it, and the tensors that the ops read. Built in one
// pass by KvCache::Reserve and given to the device as flat arrays; nothing in it is read back in mid-step. Its buffers
// grow to the largest step seen and stay, so a step allocates nothing after warm-up. Internal to kvcache/.
//
// Arrays per layer lie one after the other, layer 0 first; list_begin counts pages of all layers. The pointers below are
// the host's; ops get the same places on the device side (Device), which Begin fills by one upload an array, or moves on by
// one where the step is the last one once more.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/mirrored_buffer.h"
#include "kvcache/block_table.h"
#include "kvcache/kv_cache.h"
#include "kvcache/page_pool.h"

namespace loupe {

// The rows of one item: `num_prompt` from prompt_begin on, then `num_decode` from decode_begin on.
struct StepItem {
  Sequence* sequence = nullptr;
  int num_prompt = 0;
  int num_decode = 0;
  int prompt_begin = 0;
  int decode_begin = 0;
  bool ends_prefill = false;

  int rows() const { return num_prompt + num_decode; }
};

// Places that a list's table has beyond its pages in steps that may be moved on.
inline constexpr int kTableRoom = 16;

// What changes in a list's table at Commit, beyond the counts.
struct ListDelta {
  int item = 0;
  int list = 0;        // layer * G + kv head
  int first_new = 0;   // index in the list's table of the first new page
  int new_begin = 0;   // into State::new_pages
  int new_count = 0;
  int num_replaced = 0;  // pages at the table's end that the first new one takes over
  int num_copied = 0;    // entries in them
  int num_filled = 0;    // rows that go into the last page that stays
  int before_tail = 0;   // KvList::before_tail after the step
};

struct KvBatch::State {
  std::vector<StepItem> items;
  std::vector<ListDelta> deltas;
  std::vector<PageRef> new_pages;  // counts as after the step
  std::optional<Reservation> reservation;
  std::vector<EntryCopy> copies;
  std::vector<int64_t> page_begin;  // [layers + 1]
  std::vector<uint8_t> appended;    // [layers]
  std::vector<Tensor> extra_pages;  // [layers], undefined if not set
  std::vector<Tensor> extra_counts;
  int num_rows = 0;
  int prompt_rows = 0;
  bool wants_mass = false;
  bool wants_probability = false;
  bool wants_rows = false;  // query rows, columns or output norms are read in Attend
  bool wants_entries = false;
  bool coded = false;  // a sequence of the step may hold coded pages
  bool in_flight = false;
  bool begun = false;

  // After a decode step of one row an item, the arrays need only move on by one for the next step of the same sequences.
  bool can_advance = false;  // this step's can: there is room in the tables
  bool advances = false;     // this step's are the last one's, moved on by Begin
  std::vector<std::pair<int32_t, uint64_t>> advanceable;  // sequence and its version, as the last step left them; or none
  std::vector<uint8_t> left_in_tail;  // [layers, B, G]: entries until the list's row goes into another page
  std::vector<uint8_t> left_in_table;  // pages
  int num_tails = 0;
  MirroredBuffer tail_buffer;  // TailPages

  MirroredBuffer row_buffer;   // everything that is sized by rows and lists
  MirroredBuffer page_buffer;  // PageRefs of all layers
  MirroredBuffer mass_buffer;
  MirroredBuffer probability_buffer;
  int64_t row_bytes = 0;       // in use of row_buffer
  int32_t* positions = nullptr;      // [T]
  int32_t* row_sequence = nullptr;   // [T]
  int32_t* list_begin = nullptr;     // [layers, B * G + 1]
  int32_t* list_end = nullptr;       // [layers, B * G]
  int32_t* visible_begin = nullptr;  // [layers, T, G]
  int32_t* visible_end = nullptr;    // [layers, T, G]
  PageRef* slots = nullptr;          // [layers, T, G]

  // The device side of a place in row_buffer.
  template <class T>
  T* Device(T* host) const {
    return reinterpret_cast<T*>(row_buffer.device<char>() + (reinterpret_cast<char*>(host) - row_buffer.host<char>()));
  }
  // Forgets the step, keeps the memory.
  void Clear();
};

}  // namespace loupe
