// Dropout mask of attention weights. Included once for each instruction set.
//
// The mask equals that of the Triton kernels (effasr_kernels/shared/philox.py): Philox with seven
// rounds, whose counter is the sequence, the head, and the row and column of the weight. One call
// gives 8 bits for each of 16 weights of a 16 x 32 block.

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
// `query + i` and key `key + j`. These start at a multiple of 16 and 32; whole blocks are written.
inline void keep_factors(const PackedAttention& a, const HeadSequence& s, int query, int queries,
                         int key, int keys, float* factors) {
  const uint64_t seed = static_cast<uint64_t>(a.seed);
  const Philox philox = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                         static_cast<uint32_t>(s.head), static_cast<uint32_t>(s.number)};
  const uint32_t threshold = static_cast<uint32_t>(a.dropout * 256.0f) << 24;
  const float kept = 1.0f / (1.0f - a.dropout);
  // Every call covers columns of all parts of its block.
  const int whole = (keys + 31) / 32 * 32;
  for (int i = 0; i < queries; i += 16) {
    for (int j = 0; j < whole; j += 8) {
      uint32_t word[4][8];
      philox.words((query + i) / 2, (key + j) / 8, word);
      // Call c of a block covers its columns 2 c and 2 c + 1, and those 8, 16 and 24 after them.
      const int column = j / 32 * 32 + j % 32 / 8 * 2;
      for (int w = 0; w < 4; ++w) {
        float* block = factors + static_cast<int64_t>(column + w % 2 + w / 2 * 16) * kPanel + i;
        for (int byte = 0; byte < 4; ++byte) {
          float* first = block + byte % 2 * 8 * kPanel + byte / 2 * 8;
          for (int lane = 0; lane < 8; ++lane) {
            first[lane] = (word[w][lane] << (24 - 8 * byte)) >= threshold ? kept : 0.0f;
          }
        }
      }
    }
  }
}
