// The reader of coded pages on byte dot products (VPDPBUSD), for the file of AVX-512. Codes become unsigned bytes by a table
// of 16; queries and weights are rounded to 16 bits with one scale a head (a page's weights: a head and page), as two signed
// bytes, so what they lose is 2^-16 of their largest: far below the codes' own error. Sums of products are exact integers.
// Included after that file's Vector, inside namespace loupe::attend.

// Behind a turned query (TurnedFloats): its bytes, high ones first, what they are to be multiplied with, and their sums.
struct QueryBytes {
  int8_t *high, *low;  // [D]
  float* scale;        // of high * 256 + low
  int32_t* sums;       // of the high bytes, of the low ones
  QueryBytes(const float* turned, int dim)
      : high(reinterpret_cast<int8_t*>(const_cast<float*>(turned) + dim)), low(high + dim),
        scale(reinterpret_cast<float*>(low + dim)), sums(reinterpret_cast<int32_t*>(scale + 1)) {}
};

// x [16 * n] to two signed bytes each: x = (high * 256 + low) * the result. Sums of both planes are added to `sums`.
[[gnu::always_inline]] inline float SplitBytes(const float* x, int n, int8_t* high, int8_t* low, int32_t* sums) {
  __m512 top = _mm512_setzero_ps();
  for (int i = 0; i < n; ++i) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(x + i * 16)));
  const float largest = _mm512_reduce_max_ps(top);
  const float factor = largest > 0 ? 32512.f / largest : 0.f;  // 127 * 256
  __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
  for (int i = 0; i < n; ++i) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * 16), _mm512_set1_ps(factor)));
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
    high_sum = _mm512_add_epi32(high_sum, upper), low_sum = _mm512_add_epi32(low_sum, lower);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i * 16), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i * 16), _mm512_cvtepi32_epi8(lower));
  }
  sums[0] = _mm512_reduce_add_epi32(high_sum), sums[1] = _mm512_reduce_add_epi32(low_sum);
  return largest / 32512.f;
}

// sum += four codes times four bytes, in each of 16 lanes. As an instruction: the compiler's intrinsic copies its sums.
[[gnu::always_inline]] inline void AddProducts(__m512i& sum, __m512i codes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int32_t(*)[1]>(four)));
}

// Codes as unsigned bytes: level = byte - kOffset + (kHalf ? 1/2 : 0).
template <Codec kCodec>
struct ByteCodes {
  static constexpr int kBits = kCodec == Codec::kS3 ? 2 : CodecBits(kCodec);
  static constexpr int kFields = 8 / kBits;
  static constexpr int kOffset = kCodec == Codec::kS8 ? 128 : 64;
  static constexpr float kHalf = kCodec == Codec::kS8 ? 0.f : .5f;

  struct Table {
    alignas(16) uint8_t bytes[16];
    constexpr Table() : bytes() {
      if (kCodec == Codec::kS8) return;
      for (int code = 0; code < 16; ++code) {
        bytes[code] = static_cast<uint8_t>((spherical::TwiceLevel(spherical::LevelsOf(kCodec), code) + 2 * kOffset - 1) / 2);
      }
    }
  };
  static constexpr Table kTable{};
  static __m512i LoadTable() {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable.bytes)));
  }
  // Field `f` of 64 bytes; of s3 with bit `sign` of `signs`.
  [[gnu::always_inline]] static __m512i Load(__m512i words, int f, __m512i signs, int sign, __m512i table) {
    if constexpr (kCodec == Codec::kS8) return words;
    __m512i field = _mm512_and_si512(_mm512_srli_epi16(words, static_cast<unsigned>(kBits * f)), _mm512_set1_epi8((1 << kBits) - 1));
    if constexpr (kCodec == Codec::kS3) {
      const __m512i bit = _mm512_and_si512(_mm512_srli_epi16(signs, static_cast<unsigned>(sign)), _mm512_set1_epi8(1));
      field = _mm512_or_si512(field, _mm512_slli_epi16(bit, 2));
    }
    return _mm512_shuffle_epi8(table, field);
  }
};

// Takes the place of the reader in f32.
template <Codec kCodec>
struct CodedPage<Vector, kCodec> {
  using C = ByteCodes<kCodec>;

  template <int H, int B>
  static void ScoreBlocks(const ScoresArgs<Vector>& a, int block) {
    const int dim = a.head_dim;
    const int64_t block_bytes = PlaneBytes(kCodec, dim) * 16;
    const uint8_t* keys = a.page.keys + block * block_bytes;
    const uint8_t* ahead = a.ahead + block * block_bytes;
    const __m512i table = C::LoadTable();
    __m512i high[H][B], low[H][B];
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      const QueryBytes q(a.q + h * a.q_stride, dim);
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) {
        high[h][b] = _mm512_set1_epi32(-C::kOffset * q.sums[0]), low[h][b] = _mm512_set1_epi32(-C::kOffset * q.sums[1]);
      }
    }
    for (int i = 0; i < dim / (4 * C::kFields); ++i) {
      __m512i words[B], signs[B];
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) {
        Vector::Prefetch(ahead + b * block_bytes + i * 64);
        words[b] = _mm512_loadu_si512(keys + b * block_bytes + i * 64);
        signs[b] = kCodec == Codec::kS3 ? _mm512_loadu_si512(keys + b * block_bytes + 4 * dim + i / 2 * 64) : words[b];
      }
      LOUPE_ATTEND_UNROLL for (int f = 0; f < C::kFields; ++f) {
        const int d = (i * C::kFields + f) * 4;
        __m512i codes[B];
        LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) codes[b] = C::Load(words[b], f, signs[b], i % 2 * 4 + f, table);
        LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
          const QueryBytes q(a.q + h * a.q_stride, dim);
          LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) {
            AddProducts(high[h][b], codes[b], q.high + d);
            AddProducts(low[h][b], codes[b], q.low + d);
          }
        }
      }
    }
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      const QueryBytes q(a.q + h * a.q_stride, dim);
      const float half = C::kHalf * (256.f * static_cast<float>(q.sums[0]) + static_cast<float>(q.sums[1]));
      LOUPE_ATTEND_UNROLL for (int b = 0; b < B; ++b) {
        const Vector scale = Vector::LoadHalfs(reinterpret_cast<const uint8_t*>(a.page.key_scales + (block + b) * 16));
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[h][b]), _mm512_set1_ps(256.f),
                                           _mm512_add_ps(_mm512_cvtepi32_ps(low[h][b]), _mm512_set1_ps(half)));
        const Vector s = Vector::Mul({_mm512_mul_ps(sum, _mm512_set1_ps(*q.scale))}, scale);
        s.Store(a.s + h * a.s_stride + (block + b) * 16);
      }
    }
  }

  template <int H>
  static void Scores(const ScoresArgs<Vector>& a) {
    constexpr int kWidth = H <= 5 ? 2 : 1;
    const int blocks = (a.page.count + 15) / 16;
    int block = 0;
    for (; block + kWidth <= blocks; block += kWidth) ScoreBlocks<H, kWidth>(a, block);
    if constexpr (kWidth > 1) {
      if (block < blocks) ScoreBlocks<H, 1>(a, block);
    }
  }

  // A page's weights, scales of the values included.
  template <int H>
  struct Weights {
    alignas(64) int8_t high[H][64], low[H][64];
    float scale[H];
    int32_t sums[H][2];
  };

  // W vectors of 16 dimensions from vector `first` on.
  template <int H, int W>
  static void AddDims(const ValuesArgs<Vector>& a, const Weights<H>& p, int first) {
    const int dim = a.head_dim;
    const int64_t quad_bytes = int64_t{4} * dim / C::kFields;
    const __m512i table = C::LoadTable();
    __m512i high[H][W], low[H][W];
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      LOUPE_ATTEND_UNROLL for (int w = 0; w < W; ++w) {
        high[h][w] = _mm512_set1_epi32(-C::kOffset * p.sums[h][0]), low[h][w] = _mm512_set1_epi32(-C::kOffset * p.sums[h][1]);
      }
    }
    for (int quad = a.begin / 4; quad * 4 < a.end; ++quad) {
      const int64_t plane = quad / 4 * PlaneBytes(kCodec, dim) * 16 + quad % 4 * quad_bytes;
      const uint8_t* signs = a.page.values + quad / 4 * PlaneBytes(kCodec, dim) * 16 + 4 * dim + quad % 4 / 2 * dim;
      LOUPE_ATTEND_UNROLL for (int w = 0; w < W; ++w) {
        const int row = (first + w) / C::kFields, f = W >= C::kFields ? w % C::kFields : (first + w) % C::kFields;
        if (w % C::kFields == 0) Vector::Prefetch(a.ahead + plane + row * 64);
        const __m512i words = _mm512_loadu_si512(a.page.values + plane + row * 64);
        const __m512i sign = kCodec == Codec::kS3 ? _mm512_loadu_si512(signs + row * 64) : words;
        const __m512i codes = C::Load(words, f, sign, quad % 2 * 4 + f, table);
        LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
          AddProducts(high[h][w], codes, p.high[h] + quad * 4);
          AddProducts(low[h][w], codes, p.low[h] + quad * 4);
        }
      }
    }
    LOUPE_ATTEND_UNROLL for (int h = 0; h < H; ++h) {
      const float half = C::kHalf * (256.f * static_cast<float>(p.sums[h][0]) + static_cast<float>(p.sums[h][1]));
      LOUPE_ATTEND_UNROLL for (int w = 0; w < W; ++w) {
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[h][w]), _mm512_set1_ps(256.f),
                                           _mm512_add_ps(_mm512_cvtepi32_ps(low[h][w]), _mm512_set1_ps(half)));
        float* out = a.o + h * a.o_stride + (first + w) * 16;
        Vector::Fma({sum}, Vector::Set(p.scale[h]), Vector::Load(out)).Store(out);
      }
    }
  }

  template <int H>
  static void Values(const ValuesArgs<Vector>& a) {
    constexpr int kWidth = H <= 3 ? 4 : H <= 6 ? 2 : 1;
    Weights<H> weights;
    const int from = a.begin / 16, to = (a.end + 15) / 16;
    for (int h = 0; h < H; ++h) {
      alignas(64) float p[64];
      for (int b = from; b < to; ++b) {
        const Vector scale = Vector::LoadHalfs(reinterpret_cast<const uint8_t*>(a.page.value_scales + b * 16));
        Vector::Mul(Vector::Load(a.p + h * a.p_stride + b * 16), scale).Store(p + b * 16);
      }
      for (int e = from * 16; e < a.begin; ++e) p[e] = 0;  // outside there may be anything
      for (int e = a.end; e < to * 16; ++e) p[e] = 0;
      weights.scale[h] = SplitBytes(p + from * 16, to - from, weights.high[h] + from * 16, weights.low[h] + from * 16, weights.sums[h]);
    }
    for (int first = 0; first < a.head_dim / 16; first += kWidth) AddDims<H, kWidth>(a, weights, first);
  }
};
