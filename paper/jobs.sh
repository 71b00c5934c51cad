# Several commands at once, for the scripts beside this file; JOBS says how many.
jobs=()
later() { # COMMAND...: beside at most JOBS - 1 others
  while (($(jobs -rp | wc -l) >= ${JOBS:-1})); do wait -n; done
  "$@" &
  jobs+=($!)
}

finish() { # waits for all, and fails with the first that failed
  local job
  for job in "${jobs[@]}"; do wait "$job"; done
}
