// Dropout mask of attention weights. Included once for each instruction set.
//
// The mask equals that of the Triton kernels (effasr_kernels/shared/philox.py): Philox with seven
// rounds, whose counter is the sequence, the head, and the row and column of the weight. One call
// gives 16 bits for each of eight weights of a 16 x 16 block.

struct Philox {
  uint32_t key0, key1, head, sequence;

  // Random words for the counters (first + i, column, head, sequence), for eight i.
  void words(uint32_t first, uint32_t column, uint32_t word[4][8]) const {
    for (int i = 0; i < 8; ++i) {
      word[0][i] = first + i;
      word[1][i] = column;
      word[2][i] = head;
      word[3][i] = sequence;
    }
    uint32_t k0 = key0, k1 = key1;
    for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      for (int i = 0; i < 8; ++i) {
        const uint64_t a = uint64_t{0xD2511F53u} * word[0][i];
        const uint64_t b = uint64_t{0xCD9E8D57u} * word[2][i];
        word[0][i] = static_cast<uint32_t>(b >> 32) ^ word[1][i] ^ k0;
        word[2][i] = static_cast<uint32_t>(a >> 32) ^ word[3][i] ^ k1;
        word[1][i] = static_cast<uint32_t>(b);
        word[3][i] = static_cast<uint32_t>(a);
      }
    }
  }
};

// Writes the factors of a tile of weights, 0 or 1 / (1 - dropout): factors[j][i] is for query
// `query + i` and key `key + j`. Both start at a multiple of 16; whole blocks are written.
inline void keep_factors(const PackedAttention& a, const HeadSequence& s, int query, int queries,
                         int key, int keys, float* factors) {
  const uint64_t seed = static_cast<uint64_t>(a.seed);
  const Philox philox = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                         static_cast<uint32_t>(s.head), static_cast<uint32_t>(s.number)};
  const uint32_t threshold = static_cast<uint32_t>(a.dropout * 65536.0f + 0.5f);
  const float kept = 1.0f / (1.0f - a.dropout);
  // Every call covers columns of both halves of its block.
  const int whole = (keys + 15) / 16 * 16;
  for (int i = 0; i < queries; i += 16) {
    for (int j = 0; j < whole; j += 4) {
      uint32_t word[4][8];
      philox.words((query + i) / 2, (key + j) / 4, word);
      // Call c of a block covers its columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9.
      const int column = j / 16 * 16 + j % 16 / 4 * 2;
      for (int w = 0; w < 4; ++w) {
        float* low = factors + static_cast<int64_t>(column + w % 2 * 8) * kPanel + i + w / 2 * 8;
        float* high = low + kPanel;
        for (int lane = 0; lane < 8; ++lane) {
          low[lane] = (word[w][lane] & 0xFFFFu) >= threshold ? kept : 0.0f;
          high[lane] = (word[w][lane] >> 16) >= threshold ? kept : 0.0f;
        }
      }
    }
  }
}
