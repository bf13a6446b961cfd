export PYTHONPATH=$PWD:$PWD/../site LINATTN_CACHE_DIR=/tmp/cc
mkdir -p $OUT
timeout 32 python -m bench portable_attention --backend cuda --results $OUT --cases 0 1 3 4 5 6 7 8 9 --tiles > $OUT/bench.log 2>&1; echo "bench rc $?"; cut -c1-900 $OUT/bench.log | tail -c 7000
(timeout 60 python -m pytest -p no:benchmark -q -n 9 --maxfail 25 --tb=line tests/softmax/test_cuda_portable.py > $OUT/t1.log 2>&1; echo "portable rc $?" >> $OUT/t1.log) &
(LINATTN_CUDA_PORTABLE=1 timeout 50 python -m pytest -p no:benchmark -q -n 5 --maxfail 10 --tb=line tests/softmax/test_cuda.py -k "lengths or bits or causality or gates or windows or replay" > $OUT/t2.log 2>&1; echo "env rc $?" >> $OUT/t2.log) &
wait
tail -c 3500 $OUT/t1.log; tail -c 1800 $OUT/t2.log
