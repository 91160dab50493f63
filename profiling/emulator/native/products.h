// Matrix instructions. Part of machine.cpp. Sums are in double, and rounded once to float: a GPU
// rounds each product of 16 somewhat worse.

// Operands: matrices (1, 2, 4), whether transposed, address (3), then the registers' places.
void Block::move_matrices(Warp& warp, const int32_t* a, bool stores) {
  uint32_t* r = warp.registers.data();
  const int matrices = a[0];
  count(kShared, warp, a + 2, 16, matrices == 4 ? kAll : (1u << 8 * matrices) - 1);
  for (int matrix = 0; matrix < matrices; ++matrix) {
    for (int row = 0; row < 8; ++row) {
      const uint64_t at = address(warp, a + 2, matrix * 8 + row);
      uint16_t values[8];
      if (!stores) std::memcpy(values, load_from(kShared, at, 16, warp), 16);
      for (int column = 0; column < 8; ++column) {
        // A lane holds two neighbours of a row; transposed, of a column.
        const int i = a[1] ? column : row, j = a[1] ? row : column;
        uint32_t& word = r[a[5 + matrix] + i * 4 + j / 2];
        if (stores) values[column] = word >> 16 * (j % 2);
        else word = (word & ~(0xffffu << 16 * (j % 2))) | uint32_t{values[column]} << 16 * (j % 2);
      }
      if (stores) store_to(kShared, at, values, 16, warp);
    }
  }
}

// Operands: whether bfloat16, then places of d (4), a (4), b (2), c (4): 16 x 16 by 16 x 8.
void Block::multiply(Warp& warp, const int32_t* a) {
  uint32_t* r = warp.registers.data();
  const bool wide = a[0];
  if (launch_.counts) counts().products += 16 * 8 * 16;
  const int32_t *to = a + 1, *left = a + 5, *right = a + 9, *plus = a + 11;
  float results[16][8];
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      const Place c = place_c(row, column);
      double sum = bits<float>(r[plus[c.word] + c.lane]);
      for (int k = 0; k < 16; ++k) {
        const Place x = place_a(row, k), y = place_b(k, column);
        sum += static_cast<double>(narrow(r[left[x.word] + x.lane] >> 16 * x.half, wide)) *
               narrow(r[right[y.word] + y.lane] >> 16 * y.half, wide);
      }
      results[row][column] = sum;
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      const Place c = place_c(row, column);
      r[to[c.word] + c.lane] = bits<uint32_t>(results[row][column]);
    }
}

// Operands: columns, whether bfloat16, whether a is in registers, whether a and b lie across k, places of
// descriptor a (or -1), of descriptor b, of the predicate "add", four of a, then those of d. A warp
// multiplies its own 16 of the 64 rows.
void Block::begin_product(Warp& warp, const int32_t* a) {
  const uint32_t* r = warp.registers.data();
  if (launch_.counts) counts().products += 16 * 16 * a[0];
  if (!warp.fenced) throw std::runtime_error("multiplies without wgmma.fence since the last wait");
  if (warps_.size() % 4) throw std::runtime_error("multiplies in a part of a group of four warps");
  const auto wide = [&](int32_t place) { return reinterpret_cast<const uint64_t*>(r + place)[0]; };
  Product x{a, a[2] ? 0 : wide(a[5]), wide(a[6]), r[a[7]] != 0};
  visit_operands(warp, x, [&](uint32_t at) {
    shared_.begin_product(at, 2, warp.phase, warp.number, fences_);
  });
  warp.products.push_back(x);
}

template <class Visit>
void Block::visit_operands(const Warp& warp, const Product& x, Visit visit) const {
  const Descriptor left(x.descriptor_a), right(x.descriptor_b);
  for (int k = 0; k < 16; ++k) {
    if (!x.a[2])
      for (int row = 0; row < 16; ++row) visit(left.address(warp.number % 4 * 16 + row, k, x.a[3]));
    for (int column = 0; column < x.a[0]; ++column) visit(right.address(column, k, x.a[4]));
  }
}

void Block::end_product(Warp& warp, const Product& x) {
  uint32_t* r = warp.registers.data();
  const int32_t *a = x.a, *held = a + 8, *to = a + 12;
  const int columns = a[0];
  const bool wide = a[1];
  const Descriptor left(x.descriptor_a), right(x.descriptor_b);
  visit_operands(warp, x, [&](uint32_t at) { shared_.end_product(at, 2, warp.phase, warp.number); });
  const auto shared = [&](uint32_t at) {
    uint16_t value;
    std::memcpy(&value, bytes_ + at, 2);
    return narrow(value, wide);
  };
  std::vector<float> rows(16 * 16), lines(columns * 16);
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 16; ++row) {
      const Place place = place_a(row, k);
      rows[row * 16 + k] = a[2] ? narrow(r[held[place.word] + place.lane] >> 16 * place.half, wide)
                                : shared(left.address(warp.number % 4 * 16 + row, k, a[3]));
    }
    for (int column = 0; column < columns; ++column)
      lines[column * 16 + k] = shared(right.address(column, k, a[4]));
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < columns; ++column) {
      const Place c = place_c(row, column % 8);
      uint32_t& word = r[to[column / 8 * 4 + c.word] + c.lane];
      double sum = x.adds ? bits<float>(word) : 0.0;
      for (int k = 0; k < 16; ++k)
        sum += static_cast<double>(rows[row * 16 + k]) * lines[column * 16 + k];
      word = bits<uint32_t>(static_cast<float>(sum));
    }
  }
}
