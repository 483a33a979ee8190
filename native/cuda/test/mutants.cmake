# Faults that the kernel tests must find: a missing barrier, a shifted index, a swapped lane, a dropped bound, a lost
# term. In brackets stand the text to replace, which occurs once in the operation's source, and its replacement.

duokv_mutant(rms_norm forward_bound checked [[if (row >= m) return;
  x += row]] [[x += row]])
duokv_mutant(rms_norm forward_shifted_lane checked
             [[float squares = 0;
  for (int c = lane * S::kWidth;]]
             [[float squares = 0;
  for (int c = (lane + 1) * S::kWidth;]])
duokv_mutant(rms_norm forward_column_bound checked
             [[    a.store(y + c);]]
             [[    a.store(y + c + S::kWidth);]])
duokv_mutant(rms_norm forward_width checked
             [[/ static_cast<float>(d) + eps]]
             [[/ static_cast<float>(d + 1) + eps]])
duokv_mutant(rms_norm rstd_of_every_lane race [[if (rstd && lane == 0)]] [[if (rstd)]])
duokv_mutant(rms_norm backward_row_bound checked
             [[first + kRowsPerBlock < m ? first + kRowsPerBlock : m]]
             [[first + kRowsPerBlock]])
duokv_mutant(rms_norm backward_shared_accumulator_not_cleared checked
             [[S{}.store(own_dw + c)]]
             [[static_cast<void>(own_dw)]])
duokv_mutant(rms_norm backward_warps_share_a_row race
             [[shared_dw + static_cast<size_t>(warp) * d]]
             [[shared_dw]])
foreach(variant checked race)
  duokv_mutant(rms_norm backward_barrier ${variant} [[  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x)]] [[  for (int c = static_cast<int>(threadIdx.x)]])
  duokv_mutant(rms_norm sum_barrier ${variant} [[  __syncthreads();
  if (group != 0]] [[  if (group != 0]])
endforeach()
duokv_mutant(rms_norm backward_projection checked [[* scale * scale * scale]] [[* scale * scale]])
duokv_mutant(rms_norm backward_not_accumulated checked [[if (accumulate) out =]] [[if (!accumulate) out =]])
duokv_mutant(rms_norm backward_no_opt_in checked [[cudaFuncAttributeMaxDynamicSharedMemorySize]]
             [[cudaFuncAttributePreferredSharedMemoryCarveout]])
duokv_mutant(rms_norm sum_divergent_barrier checked [[  group_sum[group][column] = sum;
]] [[  if (c >= d) return;
  group_sum[group][column] = sum;
]])
duokv_mutant(rms_norm sum_lost_group checked [[int i = 1; i < kSumGroups;]] [[int i = 2; i < kSumGroups;]])
duokv_mutant(rms_norm sum_block_bound checked [[b < first + run && b < blocks]] [[b < first + run]])
duokv_mutant(rms_norm unaligned_vectors checked
             [[vectorizable(args.d, {args.x, args.w, y})]]
             [[args.d % 2 == 0]])

duokv_mutant(swiglu forward_bound checked [=[if (i < n) h[i]]=] [=[h[i]]=])
duokv_mutant(swiglu forward_vector_bound checked
             [[if (i >= n) return;
  const float4 g = load4(gate + i), u = up ? load4(up + i) : make_float4(1, 1, 1, 1);]]
             [[const float4 g = load4(gate + i), u = up ? load4(up + i) : make_float4(1, 1, 1, 1);]])
duokv_mutant(swiglu forward_swapped_elements checked
             [[make_float4(forward(g.x, u.x), forward(g.y, u.y)]]
             [[make_float4(forward(g.y, u.y), forward(g.x, u.x)]])
duokv_mutant(swiglu backward_bound checked [[  if (i >= n) return;
  const Gradients d]] [[  const Gradients d]])
duokv_mutant(swiglu backward_missing_term checked [[s * (1.0f + gate * (1.0f - s))]] [[s * (1.0f + gate)]])
duokv_mutant(swiglu backward_alignment_unchecked checked
             [[vectorizable(args.n, {args.gate, args.up, args.dh, args.dgate, args.dup})]]
             [[args.n % 4 == 0]])
duokv_mutant(swiglu backward_missing_null_check checked [[  if (dup) dup[i] = d.up;]] [[  dup[i] = d.up;]])

duokv_mutant(embedding forward_bound checked [[if (row >= m) return;
  const float* source]] [[const float* source]])
duokv_mutant(embedding forward_shifted_row checked
             [[table + int64_t{tokens[row]} * d]]
             [[table + int64_t{tokens[row] + 1} * d]])
duokv_mutant(embedding counts_without_atomics race
             [[atomicAdd(groups.count + tokens[row], 1)]]
             [=[groups.count[tokens[row]] += 1]=])
duokv_mutant(embedding counters_not_cleared checked
             [[fill_zero(groups.count, (2 * static_cast<size_t>(vocab) + 1) * sizeof(int), stream)]]
             [[fill_zero(groups.count, 2 * static_cast<size_t>(vocab) * sizeof(int), stream)]])
duokv_mutant(embedding places_without_atomics race
             [[atomicAdd(groups.filled + token, 1)]]
             [[groups.filled[token]++]])
duokv_mutant(embedding rank_in_arrival_order checked
             [[groups.members[start + i] < row;]]
             [[groups.members[start + i] != row && i < row % count;]])
duokv_mutant(embedding every_row_sums checked [[if (groups.sorted[start] != row) return;]] "")
duokv_mutant(embedding strip_bound checked [[lane * 4;
    if (c >= d) return;]] [[lane * 4;]])
duokv_mutant(embedding strips_overlap checked [[* kStripColumns + j + lane]] [[* kWarpSize + j + lane]])
duokv_mutant(embedding short_workspace checked [[(3 * vocab + 1 + 2 * m)]] [[(3 * vocab + 2 * m)]])

duokv_mutant(sum_squares single_precision checked [[return fma(wide, wide, sum);]] [[return fmaf(value, value, sum);]])
duokv_mutant(sum_squares whole_block_bound checked [[if (Vector && (int64_t{blockIdx.x} + 1)]] [[if (Vector && int64_t{blockIdx.x}]])
duokv_mutant(sum_squares element_bound checked [[j < i + 4 && j < n; ++j]] [[j < i + 4; ++j]])
duokv_mutant(sum_squares group_bound checked [[i < first + kBlockElements && i < n]] [[i < first + kBlockElements - 4 * kThreads && i < n]])
duokv_mutant(sum_squares lost_block checked [[int64_t i = threadIdx.x; i < blocks; i += kThreads]]
             [[int64_t i = threadIdx.x; i + 1 < blocks; i += kThreads]])
duokv_mutant(sum_squares every_thread_writes race [[if (threadIdx.x == 0) partial]] [[partial]])

duokv_mutant(adamw bound checked [=[if (i < n) update(p[i]]=] [=[update(p[i]]=])
duokv_mutant(adamw vector_bound checked [[if (i >= n) return;]] "")
duokv_mutant(adamw alignment_unchecked checked [[vectorizable(args.n, {args.p, args.g, args.m, args.v})]]
             [[args.n % 4 == 0]])
duokv_mutant(adamw unclipped_square checked [[(gradient * gradient)]] [[(g * g)]])
duokv_mutant(adamw no_decay checked [[fmaf(f.decay, p, f.step * m / denominator)]] [[f.step * m / denominator]])
duokv_mutant(adamw uncorrected_root checked [[fmaf(sqrtf(v), f.root, f.eps)]] [[sqrtf(v) + f.eps]])
duokv_mutant(adamw swapped_elements checked [[gradient.y, first.y]] [[gradient.z, first.y]])

duokv_mutant(cross_entropy row_bound checked [[Vector) return i < vocab ?]] [[Vector) return i <= vocab ?]])
duokv_mutant(cross_entropy padding_counts checked [[const float none = -INFINITY;]] [[const float none = 0;]])
duokv_mutant(cross_entropy sum_not_rescaled checked [[if (top > max) sum *=]] [[if (top > max + 1e3f) sum *=]])
duokv_mutant(cross_entropy infinite_base checked [[max == -INFINITY ? 0.0f : max;]] [[max;]])
duokv_mutant(cross_entropy lost_warp checked [[others = 0;
  for (int i = 0; i < kWarps;]] [[others = 0;
  for (int i = 1; i < kWarps;]])
duokv_mutant(cross_entropy warps_on_their_own_base checked
             [=[warp_sums[i] * expf(warp_maxima[i] - base)]=]
             [=[warp_sums[i]]=])
foreach(variant checked race)
  duokv_mutant(cross_entropy barrier ${variant} [[  __syncthreads();
]] "")
endforeach()
duokv_mutant(cross_entropy target_read_late race
             [[static_cast<double>(target_logit) - sum.base;]]
             [[static_cast<double>(row[target]) - sum.base;]])
duokv_mutant(cross_entropy shifted_target checked [[hit = target - i;]] [[hit = target - i + 1;]])
duokv_mutant(cross_entropy target_summed_with_the_others checked [[sum.others + expf(target_logit - sum.base)]]
             [[sum.others]])
duokv_mutant(cross_entropy difference_from_one checked [[-scale * (sum.others / total)]]
             [[expf(target_logit - sum.base) * factor - scale]])
duokv_mutant(cross_entropy base_without_target checked [[float top = target_logit;]] [[float top = -INFINITY;]])
duokv_mutant(cross_entropy gradient_of_uncounted_rows checked [[if (scale != 0) {]] [[{]])
duokv_mutant(cross_entropy store_bound checked [[if (i < vocab) store_gradient]] [[store_gradient]])
duokv_mutant(cross_entropy alignment_unchecked checked [[vectorizable(args.vocab, {args.logits, args.dlogits})]]
             [[args.vocab % 4 == 0]])

duokv_mutant(attention_backward key_tile_barrier checked [[    __syncthreads();  // the tile is there, and the other stage is no longer read
    if (next]] [[    if (next]])
duokv_mutant(attention_backward query_tile_barrier checked [[      __syncthreads();  // the tile is there, and the other stage is no longer read
      if (tile]] [[      if (tile]])
duokv_mutant(attention_backward bank_barrier race [[    __syncthreads();  // the bank before is no longer read
]] "")
duokv_mutant(attention_backward key_tile_not_waited_for checked [[    copy_async_wait<0>();
    __syncthreads();  // the tile is there, and the other stage is no longer read
    if (next]] [[    __syncthreads();
    if (next]])
duokv_mutant(attention_backward scratch_read_too_early race [[    __syncwarp();
#pragma unroll 4]] [[#pragma unroll 4]] attention_backward_products.cuh)
duokv_mutant(attention_backward scratch_written_too_early race [[    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4)]] [[#pragma unroll
    for (int i = 0; i < 16; i += 4)]] attention_backward_products.cuh)
duokv_mutant(attention_backward swapped_lanes checked [[spread(g) + i % 4 / 2 * 8]] [[g + i % 4 / 2 * 8]] attention_backward_products.cuh)
duokv_mutant(attention_backward swapped_columns checked [[8 * t + v % 2 * 4]] [[4 * t + v % 2 * 16]] attention_backward_products.cuh)
duokv_mutant(attention_backward swapped_steps checked
             [[pack_bf16(high[0], high[1]), pack_bf16(low[2], low[3])]]
             [[pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1])]] attention_backward_products.cuh)
duokv_mutant(attention_backward accumulator_not_flushed checked
             [[      mma_tf32x3_m16n8k16(sums[n], a.steps, right);]]
             [[      for (int i = 0; i < 2; ++i) {
        mma_tf32_m16n8k8(sums[n], a.steps[i].small, right[i].big, sums[n]);
        mma_tf32_m16n8k8(sums[n], a.steps[i].big, right[i].small, sums[n]);
        mma_tf32_m16n8k8(sums[n], a.steps[i].big, right[i].big, sums[n]);
      }]] attention_backward_products.cuh)
duokv_mutant(attention_backward lost_residual checked
             [[      mma_tf32x3_m16n8k16(sums[n], a.steps, right);]]
             [[      for (int i = 0; i < 2; ++i) {
        float product[4] = {};
        mma_tf32_m16n8k8(product, a.steps[i].small, right[i].big, product);
        mma_tf32_m16n8k8(product, a.steps[i].big, right[i].big, product);
        for (int j = 0; j < 4; ++j) sums[n][j] += product[j];
      }]] attention_backward_products.cuh)
duokv_mutant(attention_backward entry_of_the_query_itself_hidden checked [[entry <= last]] [[entry < last]])
duokv_mutant(attention_backward first_entry_hidden checked [[terms.first <= entry]] [[terms.first < entry]])
duokv_mutant(attention_backward first_reader_missed checked [[max(0, first - start)]] [[max(0, first - start + 1)]])
duokv_mutant(attention_backward last_readers_missed checked
             [[min(first + kOwnRows, stored_end) - 1)]]
             [[min(first + kOwnRows, stored_end) - 2)]])
duokv_mutant(attention_backward reader_bound checked [[probe < end && terms]] [[terms]])
duokv_mutant(attention_backward earlier_tile_skipped checked
             [[start + t + kTileRows - 1 >= first_entry_of_warp]]
             [[start + t >= first_entry_of_warp]])
duokv_mutant(attention_backward later_tile_skipped checked
             [[.first < first_entry_of_warp + kWarpRows;]]
             [[.first < first_entry_of_warp + kWarpRows - 1;]])
duokv_mutant(attention_backward tile_before_the_window_skipped checked
             [[warp_terms[0].first < tile + kTileRows]]
             [[warp_terms[0].first < tile + kTileRows - 1]])
duokv_mutant(attention_backward tile_at_the_end_skipped checked
             [[position + kWarpRows - 1 >= tile;]]
             [[position >= tile;]])
duokv_mutant(attention_backward lost_delta checked [[(gradient - terms.delta)]] [[gradient]])
duokv_mutant(attention_backward lone_entry_has_a_gradient checked [[seen == 1 ? 0 : a.scale]] [[a.scale]])
duokv_mutant(attention_backward lost_bias checked [[{bias - lse,]] [[{-lse,]])
duokv_mutant(attention_backward one_bank_in_the_softmax checked
             [[larger : larger + log1pf(expf(smaller - larger))]]
             [[larger : larger]])
duokv_mutant(attention_backward not_accumulated checked
             [[const float4 old = load4(address);]]
             [[const float4 old = {};]])
duokv_mutant(attention_backward wrong_kv_head checked
             [[head * a.kv_heads / a.query_heads]]
             [[head % a.kv_heads]])
duokv_mutant(attention_backward lost_query_head checked [[const int64_t head = kv_head * group + tile.head]]
             [[const int64_t head = kv_head * group]])
duokv_mutant(attention_backward own_entries_bound checked [[stored_end - first,]] [[kOwnRows,]])
duokv_mutant(attention_backward tile_of_entries_bound checked
             [[stored.first + stored.count - tile,]]
             [[kTileRows,]])
duokv_mutant(attention_backward tile_of_queries_bound checked [[queries - tile.t,]] [[kTileRows,]])
duokv_mutant(attention_backward entry_bound checked [[if (entry >= stored_end || column >= a.head_dim)]] [[if (column >= a.head_dim)]])
duokv_mutant(attention_backward key_column_bound checked
             [[entry >= stored_end || column >= a.head_dim]]
             [[entry >= stored_end]])
duokv_mutant(attention_backward query_bound checked [[query >= queries || column]] [[column]])
duokv_mutant(attention_backward query_column_bound checked
             [[query >= queries || column >= a.head_dim]]
             [[query >= queries]])
duokv_mutant(attention_backward padding_not_zero checked [[row < count && column < from.head_dim]] [[row < count]])
duokv_mutant(attention_backward padding_is_seen checked [[__int_as_float(kNothing)]] [[0.0f]])
duokv_mutant(attention_backward edge_of_the_first_query checked
             [=[tile_terms[kTileRows - 1].first <= first]=]
             [=[tile_terms[0].first <= first]=])
duokv_mutant(attention_backward edge_of_the_last_query checked
             [[start + t >= min(first + kOwnRows, stored_end) - 1]]
             [[start + t + kTileRows >= min(first + kOwnRows, stored_end)]])
duokv_mutant(attention_backward edge_of_the_first_own_query checked
             [=[shared.terms()[kOwnRows - 1].first <= tile]=]
             [=[shared.terms()[0].first <= tile]=])
duokv_mutant(attention_backward edge_of_the_last_own_query checked
             [[start + first >= tile + kTileRows - 1]]
             [[start + first + kOwnRows >= tile + kTileRows]])
duokv_mutant(attention_backward seen_value_lost checked [=[sums[2] += x.z * INFINITY;]=] [=[sums[2] += 0;]=])
duokv_mutant(attention_backward scores_without_the_value race [[    if (unbounded) {
      __syncthreads();  // the]] [[    if (unbounded) {
      // the]])
duokv_mutant(attention_backward lse_of_nan checked
             [[larger = other > lse ? other : lse, smaller = other > lse ? lse : other]]
             [[larger = fmaxf(lse, other), smaller = fminf(lse, other)]])
duokv_mutant(attention_backward short_workspace checked
             [[(a.bank_count * a.batch * a.query_heads * a.queries) * sizeof(QueryTerms)]]
             [[(a.batch * a.query_heads * a.queries) * sizeof(QueryTerms)]])

duokv_mutant(sample lost_token checked [[threadIdx.x + 1) * run, vocab)]] [[threadIdx.x + 1) * run, vocab - 1)]])
duokv_mutant(sample token_bound checked
             [=[for (int i = begin; i < end; ++i) mine += measure(logits[i]);]=]
             [=[for (int i = begin; i <= end; ++i) mine += measure(logits[i]);]=])
duokv_mutant(sample highest_id_of_equals checked [[Mass{order_of(logit)} << 32 | (0xffffffffu -]]
             [[Mass{order_of(logit)} << 32 | (0u +]])
duokv_mutant(sample last_not_a_number checked [=[[](Mass a, Mass b) { return min(a, b); }]=]
             [=[[](Mass a, Mass b) { return max(a, b); }]=])
duokv_mutant(sample infinite_peak checked [[ && fabsf(peak) < INFINITY;]] [[;]])
duokv_mutant(sample lost_warp checked [[for (int i = 1; i < kWarps; ++i) value]] [[for (int i = 2; i < kWarps; ++i) value]])
duokv_mutant(sample shifted_scan checked [[if (lane >= offset) sum += before;]] [[if (lane > offset) sum += before;]])
foreach(variant checked race)
  duokv_mutant(sample scan_barrier ${variant} [[  __syncthreads();
  for (int i = 0; i < warp; ++i)]] [[  for (int i = 0; i < warp; ++i)]])
  duokv_mutant(sample choice_barrier ${variant} [[    __syncthreads();
    drawn = chosen[0];]] [[    drawn = chosen[0];]])
endforeach()
duokv_mutant(sample coarse_threshold checked [[shift >= 0; shift -= 2]] [[shift >= 24; shift -= 2]])
duokv_mutant(sample every_equal_kept checked [[seen++ < kept.equals]] [[seen++ < vocab]])
duokv_mutant(sample equals_of_this_thread_only checked [[Mass seen = equals_before;]] [[Mass seen = 0;]])
duokv_mutant(sample one_equal_too_few checked [[(target - above + each - 1) / each]] [[(target - above) / each]])
duokv_mutant(sample no_top_k checked [[if (options.top_k < vocab) kept]] [[if (options.top_k < 0) kept]])
duokv_mutant(sample top_p_of_all checked [[target_of(options.top_p, total)]]
             [[target_of(options.top_p, row.sum(weight))]])
duokv_mutant(sample no_temperature checked [[weight_of(logit, peak, inverse, bits)]] [[weight_of(logit, peak, 1, bits)]])
duokv_mutant(sample tempered_probability checked [[weight_of(logit, peak, 1, bits); });]]
             [[weight_of(logit, peak, options.temperature, bits); });]])

duokv_mutant(skinny_product barrier checked [[  __syncthreads();
]] "")
duokv_mutant(skinny_product depth_bound checked [[if (at >= depth) continue;]] [[if (at > depth) continue;]])
duokv_mutant(skinny_product column_bound checked [[min(group.first + c, group.n - 1)]] [[group.first + c]])
duokv_mutant(skinny_product row_bound checked [[owner && row < p.m && column]] [[owner && column]])
duokv_mutant(skinny_product stored_columns checked [[column < group.n ?]] [[column <= group.n ?]])
duokv_mutant(skinny_product staged_rows checked [[if (first_row + r >= p.m || k >= p.depth)]] [[if (k >= p.depth)]])
duokv_mutant(skinny_product staged_in_plain_order checked [[half = quad % kHalves,]] [[half = 0 * quad,]])
duokv_mutant(skinny_product skipped_step checked [[k + i * kStep >= p.padded) break]]
             [[k + (i + 1) * kStep >= p.padded && i > 0) break]])
duokv_mutant(skinny_product swapped_lanes checked [=[given = upper ? v[i] : v[i + Count / 2];]=]
             [=[given = upper ? v[i + Count / 2] : v[i];]=])
duokv_mutant(skinny_product every_lane_stores race [[lane * S::kSums % kWarpSize == 0]] [[lane >= 0]])
duokv_mutant(skinny_product wrong_next_group checked [[group = S::group_at(p, index + stride);]] "")
duokv_mutant(skinny_product weights_not_rounded checked [[    if (!round) return;]] [[    return;]])
duokv_mutant(skinny_product sum_rounded_after_adding checked
             [=[p.round_output ? round_bf16(sum[i])]=]
             [=[p.round_output ? round_bf16(sum[i] + before[i]) - before[i]]=])
duokv_mutant(skinny_product alignment_unchecked checked [=[vector = vector && vectorizable(4, {weights[i]})]=]
             [[static_cast<void>(vector)]])


foreach(variant checked race)
  duokv_mutant(attention_forward simt_keys_barrier ${variant}
             [[    copy_async_wait<1>();
    __syncthreads();
    float scores]]
             [[    copy_async_wait<1>();
    float scores]] attention_simt.cuh)
endforeach()
duokv_mutant(attention_forward simt_keys_in_use race
             [[    __syncthreads();
    start_keys(n + 1);]]
             [[    start_keys(n + 1);]] attention_simt.cuh)
duokv_mutant(attention_forward simt_values_barrier race
             [[    copy_async_wait<1>();
    __syncthreads();
    const bool unbounded]]
             [[    copy_async_wait<1>();
    const bool unbounded]] attention_simt.cuh)
duokv_mutant(attention_forward simt_values_in_use race
             [[    __syncthreads();
    start_values(n + 1);]]
             [[    start_values(n + 1);]] attention_simt.cuh)
duokv_mutant(attention_forward simt_wait_too_short checked
             [[    copy_async_wait<1>();
    __syncthreads();
    float scores]]
             [[    copy_async_wait<2>();
    __syncthreads();
    float scores]] attention_simt.cuh)
duokv_mutant(attention_forward simt_shifted_weight checked
             [=[kWeightStride + column_lane + 8 * j]]=]
             [=[kWeightStride + (column_lane + 1) % 8 + 8 * j]]=] attention_simt.cuh)
duokv_mutant(attention_forward simt_bank_factor checked [[weight * step.factor]] [[weight]] attention_simt.cuh)
foreach(variant checked race)
  duokv_mutant(attention_forward mma_barrier ${variant}
             [[    __syncthreads();
    const bool more]]
             [[    const bool more]] attention_mma.cuh)
endforeach()
duokv_mutant(attention_forward mma_wrong_buffer checked
             [[products.apply(scores, values + n % 2 * kValueTile]]
             [[products.apply(scores, values + (n + 1) % 2 * kValueTile]] attention_mma.cuh)
duokv_mutant(attention_forward mma_swapped_fragment checked
             [=[{w[0], w[2], w[1], w[3]}]=]
             [=[{w[0], w[1], w[2], w[3]}]=] attention_mma.cuh)
duokv_mutant(attention_forward mma_swapped_matrices checked
             [[lane / 8 % 2 * 8]]
             [[lane / 16 % 2 * 8]] attention_mma.cuh)
duokv_mutant(attention_forward mma_bank_factor checked
             [=[if (second) scores[m][j][e] *= step.factor;]=]
             "" attention_mma.cuh)
duokv_mutant(attention_forward mma_shrinks_of_last_row checked
             [[shrinks = shrinks || step.shrink != 1;]]
             [[shrinks = step.shrink != 1;]] attention_mma.cuh)
duokv_mutant(attention_forward mma_vote_of_no_lane checked
             [[if (__any_sync(kFullMask, shrinks))]]
             [[if (__all_sync(kFullMask, shrinks))]] attention_mma.cuh)
duokv_mutant(attention_forward mma_tile_before_window checked
             [[see.some.begin < entries.first + kKeys]]
             [[see.some.begin < entries.first]] attention_mma.cuh)
duokv_mutant(attention_forward mma_masked_too_seldom checked
             [[see.all.covers(entries.first, kKeys)]]
             [[see.all.covers(entries.first, kKeys - 1)]] attention_mma.cuh)
duokv_mutant(attention_forward mma_first_bank_kept checked
             [=[          running[m][half] = Running{};
]=]
             "" attention_mma.cuh)
duokv_mutant(attention_forward lost_residual checked [=[nearest_tf32(x[i] - big)]=] [[0.0f]] attention.cuh)
duokv_mutant(attention_forward accumulator_runs_on checked
             [=[  float product[4] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) mma_tf32_m16n8k8(product, a[i].small, b[i].big, product DUOKV_FORWARD);]=]
             [=[  float product[4] = {d[0], d[1], d[2], d[3]};
  d[0] = d[1] = d[2] = d[3] = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) mma_tf32_m16n8k8(product, a[i].small, b[i].big, product DUOKV_FORWARD);]=] attention.cuh)
duokv_mutant(attention_forward past_what_is_stored checked
             [[min(row.first + row.count, last + 1)]]
             [[last + 1]] attention.cuh)
duokv_mutant(attention_forward window_too_wide checked [[first - window + 1]] [[first - window]] attention.cuh)
duokv_mutant(attention_forward ring_without_end checked
             [[return slot < row.capacity ? slot : slot - row.capacity;]]
             [[return slot;]] attention.cuh)
duokv_mutant(attention_forward row_bound checked
             [[return first_row + row < rows;]]
             [[return first_row + row <= rows;]] attention_block.cuh)
duokv_mutant(attention_forward parts_overlap checked
             [[min(view.seen.end, begin + partition.part)]]
             [[min(view.seen.end, begin + partition.part + 1)]] attention_block.cuh)
duokv_mutant(attention_forward base_not_finite checked
             [[max == kMinusInfinity ? 0.0f : max]]
             [[max]] attention_block.cuh)
duokv_mutant(attention_forward sum_not_rescaled checked
             [[  bank.sum *= exp2_approximate(bank.max - base);
]]
             "" attention_block.cuh)
duokv_mutant(attention_forward minus_infinity_is_nothing checked
             [[sees ? NAN : 0.0f]]
             [[0.0f]] attention_block.cuh)
duokv_mutant(attention_forward lse_in_base_two checked
             [[(first.max + log2f(first.sum)) * kLn2]]
             [[first.max + log2f(first.sum)]] attention_block.cuh)
duokv_mutant(attention_forward first_kv_head checked
             [[tile.kv_head * source.head_stride]]
             [[0 * source.head_stride]] attention_block.cuh)
duokv_mutant(attention_forward simt_value_hidden_from_late_rows checked
             [[rows_see(block, entries.bank, 0, S::kRows)]]
             [[rows_see(block, entries.bank, 0, 1)]] attention_simt.cuh)
duokv_mutant(attention_forward simt_value_hidden_from_early_rows checked
             [[rows_see(block, entries.bank, 0, S::kRows)]]
             [[rows_see(block, entries.bank, S::kRows - 1, 1)]] attention_simt.cuh)
duokv_mutant(attention_forward simt_seen_value_lost checked [[+= x * INFINITY]] [[+= 0]] attention_simt.cuh)
duokv_mutant(attention_forward simt_value_of_another_column checked
             [[column_lane * S::kVector + c % S::kVector]]
             [[column_lane * S::kVector]] attention_simt.cuh)
duokv_mutant(attention_forward mma_value_hidden_from_late_rows checked
             [[rows_see(block, entries.bank, 0, kRows)]]
             [[rows_see(block, entries.bank, 0, 1)]] attention_mma.cuh)
duokv_mutant(attention_forward mma_value_hidden_from_early_rows checked
             [[rows_see(block, entries.bank, 0, kRows)]]
             [[rows_see(block, entries.bank, kRows - 1, 1)]] attention_mma.cuh)
duokv_mutant(attention_forward mma_seen_value_lost checked [[+= x * INFINITY]] [[+= 0]] attention_mma.cuh)
duokv_mutant(attention_forward mma_value_of_another_column checked
             [[kVector * (2 * t + odd) + c % kVector]]
             [[kVector * (2 * t + odd)]] attention_mma.cuh)
duokv_mutant(attention_forward value_kept checked [[fabsf(x.y) < limit ? x.y : 0.0f]] [[x.y]] attention.cuh)
duokv_mutant(attention_forward too_large_for_tf32 checked [[kTf32Limit = 0x1p114f]] [[kTf32Limit = INFINITY]] attention.cuh)
duokv_mutant(attention_forward combine_bound checked [[if (vector >= vectors) return;]] "")
duokv_mutant(attention_forward combine_weight checked
             [[exp2_approximate(largest - over_both)]]
             [[exp2_approximate(sums.x - over_both)]])
duokv_mutant(attention_forward a_part_too_few checked [[longest + kPartAlignment - 1]] [[longest]])
duokv_mutant(attention_forward alignment_unchecked checked
             [=[args.banks[bank].position_stride % width != 0]=]
             [[false]])

duokv_mutant(attention_decode position_not_clamped checked
             [[min(max(position_of(r), seen.begin), seen.end - 1)]]
             [[max(position_of(r), seen.begin)]])
duokv_mutant(attention_decode entries_beside checked [[r * S::kAtOnce + beside;]] [[r * S::kAtOnce;]])
duokv_mutant(attention_decode one_chunk_less checked
             [[(entries + chunk - 2) / chunk + 1]]
             [[(entries + chunk - 1) / chunk]])
duokv_mutant(attention_decode short_workspace checked
             [[static_cast<size_t>(args.batch * chunks.total * args.query_heads) * sizeof(float2);]]
             [[static_cast<size_t>(args.batch * chunks.total * args.query_heads) * sizeof(float);]])
duokv_mutant(attention_decode combine_unwritten_chunk checked
             [[if (running[i].y != 0) part[i] =]]
             [[part[i] =]])
duokv_mutant(attention_decode combine_bank_weight checked
             [[factor = weight * step.factor;]]
             [[factor = weight;]])
duokv_mutant(attention_decode combine_lost_share checked
             [[chunk += kInFlight * kShares]]
             [[chunk += (kInFlight + 1) * kShares]])
duokv_mutant(attention_decode combine_barrier checked [[  __syncthreads();
  if (share != 0)]] [[  if (share != 0)]])
foreach(variant checked race)
  duokv_mutant(attention_decode query_barrier ${variant} [[  __syncthreads();

  const float scale]] [[  const float scale]])
endforeach()

duokv_mutant(rotary bound checked [[if (i >= pairs) return;]] "")
duokv_mutant(rotary position_of_head checked [[positions[row]} * half]] [[positions[row]} * (half + 1)]])
duokv_mutant(rotary direction checked [[direction * angle.y]] [[angle.y]])

duokv_mutant(cache write_replaced_entry race [[if (entry + row.capacity < count) return;]] "")
duokv_mutant(cache write_ring checked
             [[(row.slot + entry) % row.capacity]]
             [[row.slot + entry]])
duokv_mutant(cache write_halves checked
             [[store(v[source + half], stored_v + target + half)]]
             [[store(v[source], stored_v + target + half)]])
duokv_mutant(cache read_ring checked [[(slot + at.entry) % capacity]] [[(slot + at.entry)]])
duokv_mutant(cache copy_ring checked
             [[(dst_slot + at.entry) % dst_capacity]]
             [[(dst_slot + at.entry) % src_capacity]])

duokv_mutant(fuse forward_bound checked [[if (i >= n) return;]] "")
duokv_mutant(fuse backward_row_bound checked
             [[first + kRowsPerBlock < m ? kRowsPerBlock : m - first]]
             [[kRowsPerBlock]])
duokv_mutant(fuse backward_derivative checked [[beta * (1.0f - beta) * sum]] [[beta * sum]])
duokv_mutant(fuse logit_not_accumulated checked [[if (threadIdx.x == 0) dlogit[head] +=]] [[if (threadIdx.x == 0) dlogit[head] =]])

duokv_mutant(suffix_rows bound checked [[if (i >= elements) return;]] "")
duokv_mutant(suffix_rows prefix checked [[(count - keep) * width]] [[0 * width]])
duokv_mutant(suffix_rows not_added checked [=[sum(dst[other], src[i])]=] [=[src[i]]=])

duokv_mutant(bf16 swapped_halves checked [[pack_bf16(a.x, a.y)]] [[pack_bf16(a.y, a.x)]])
duokv_mutant(bf16 lost_residual checked [[residual ? residual[i] + value : value]] [[value]])
duokv_mutant(bf16 high_keeps_low_bits checked [[high = 0xFFFF0000u]] [[high = 0xFFFFFFFFu]] primitives.cuh)

foreach(variant checked race)
  duokv_mutant(fp32_product barrier ${variant} [[    __syncthreads();
]] "")
endforeach()
duokv_mutant(fp32_product waits_for_one_step_less checked
             [[copy_async_wait<T::kStages - 2>();]]
             [[copy_async_wait<T::kStages - 1>();]])
duokv_mutant(fp32_product last_step_not_staged checked
             [[if (step + T::kStages - 1 < steps)]]
             [[if (step + T::kStages < steps)]])
duokv_mutant(fp32_product staged_rows checked [[row < rows ? depth - k - column : 0]] [[depth - k - column]])
duokv_mutant(fp32_product staged_depth checked
             [[copy_async16(target, source, left > 0)]]
             [[copy_async16(target, source, row < rows)]])
duokv_mutant(fp32_product staged_tail checked [=[left > 3 ? source[3]]=] [=[left > 2 ? source[3]]=])
duokv_mutant(fp32_product part_of_a_pass checked [[if (Count % kPerPass != 0 && row >= Count) break;]] "")
duokv_mutant(fp32_product row_bound checked [[if (at_row >= p.m) break;]] "")
duokv_mutant(fp32_product column_bound checked [[if (at_column >= own.n) break;]] "")
duokv_mutant(fp32_product lanes_of_a_row checked [[lane % 2 + lane / 16 * 2]] [[lane % 2 + lane / 16]])
duokv_mutant(fp32_product crossed_product checked [=[fmaf(x[i].y, w.y,]=] [=[fmaf(x[i].y, w.z,]=])
duokv_mutant(fp32_product third_weight checked
             [=[tile >= p.weights[2].begin]=]
             [=[tile > p.weights[2].begin]=])
duokv_mutant(fp32_product lost_residual checked [=[p.residual[at] + sum[i][j]]=] [=[sum[i][j]]=])
duokv_mutant(fp32_product alignment_of_x_unchecked checked
             [=[vectorizable(args.w[0].k, {args.x})]=]
             [=[vectorizable(args.w[0].k, {})]=])
duokv_mutant(fp32_product alignment_of_weights_unchecked checked
             [=[vectorizable(4, {args.w[i].data})]=]
             [=[vectorizable(4, {})]=])
